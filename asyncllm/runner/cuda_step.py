"""`CudaProgram`: a model's step as a chain of Triton kernels over buffers that never move.

Nothing is allocated in a step and nothing waits for the host, so that decoding a batch can be
captured once as a CUDA graph and replayed. Few rows meet packed weights as int8, more of them as
float16 on the tensor cores, and prompt chunks meet them unpacked, a matrix at a time, through the
vendor's dense product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from asyncllm.kernels.cuda import attention, choice, rows
from asyncllm.kernels.cuda.choice import ChoiceScratch, Draws, greedy, sample
from asyncllm.kernels.cuda.products import few_rows
from asyncllm.kernels.cuda.tensor_cores import most_partial_sums, tensor_default, tensor_rows
from asyncllm.kernels.cuda.tokens import first_tokens, receive, remember
from asyncllm.kernels.cuda.unpacking import embedding_rows
from asyncllm.kernels.cuda.weights import DeviceWeight
from asyncllm.model.rope import cos_sin
from asyncllm.runner.device_model import HALF, DeviceLayer, DeviceModel, Product, Products
from asyncllm.runner.slot_edits import SlotEdits

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.causal_lm import CausalLM
    from asyncllm.model.config import ModelConfig

# Rows of which products read weights faster than they compute; and the most that tensor cores take.
FEW_ROWS: Final = 4
TENSOR_ROWS: Final = 64

QUERY: Final = torch.float16  # of queries, keys and values

ACTIVATIONS: Final = ("silu", "gelu_tanh")

# Fields of a batch that go to the device with one copy, 32-bit words of max_batch rows each.
SLOT, POSITION, FRESH, HOLDING, TOP_K, TEMPERATURE, TOP_P, MIN_P, OUTPUT, INDEX, SEED = range(11)
FIELDS: Final = 12  # a seed has two

# A decode step none of whose positions goes beyond shares their keys out to fewer programs.
SHORT: Final = 512

# Steps that the host may have written before the device has read the first of them.
RING: Final = 4


@dataclass(frozen=True, slots=True)
class Form:
    """What a decoding step has to be able to do, for which it is captured.

    Attributes:
        count: rows, those that only pad it included.
        sampled: whether any is sampled; otherwise all are greedy.
        searches: whether any has top_k, and top_p, on.
        edited: whether any has penalties or biases.
        reach: all positions are below; what `CudaProgram.reach` gives.
    """

    count: int
    sampled: bool = False
    searches: tuple[bool, bool] = (False, False)
    edited: bool = False
    reach: int = 0


def are_few(count: int) -> bool:
    """Whether so many rows are left to the products of few rows; those are compiled for a count."""
    return count <= FEW_ROWS and count & (count - 1) == 0


def refusal(config: ModelConfig, block_tokens: int) -> str | None:
    """Why the device path cannot serve a model, or `None` if it can; asked once, at load.

    Some of what it takes is never missing, so it is not asked for. Every format has a product and a
    kernel for its embedding rows: those without planes of their own become 16-bit floats. Every
    rotary embedding is a table of cos and sin by position. The tail takes any vocabulary; tokens
    that it cannot choose are chosen on the host, request by request. Whether the weights fit is
    asked by the backend, which knows the device.
    """
    widths = {
        "embedding width": (config.embedding, 32),
        "feed-forward width": (config.feed_forward, 32),
        "head width": (config.head_dim, 16),
        "width of all heads": (config.heads * config.head_dim, 32),
        "block_tokens": (block_tokens, 16),
    }
    for name, (width, multiple) in widths.items():
        if width % multiple:
            return f"{name} {width} is no multiple of {multiple}"
    if config.head_dim > 256:
        return f"head width {config.head_dim} is above 256"
    if config.architecture.activation not in ACTIVATIONS:
        return f"activation {config.architecture.activation!r} has no kernel"
    return None


@dataclass(slots=True)
class Rows:
    """One activation in the forms that products take.

    Attributes:
        quantised: int8 rows, for up to `FEW_ROWS` rows.
        tensor: float16, `ordered` for the tensor cores, for up to `TENSOR_ROWS` rows.
        half: for more.
        full: float32, for as many as `tensor`: for weights in floating point.
        squares: beside int8 rows whose norm is left to products, see `rows.half_norm`.
        half_normed: whether they are such.
    """

    quantised: tuple[Tensor, Tensor, Tensor]
    tensor: Tensor
    half: Tensor
    full: Tensor
    squares: Tensor
    half_normed: bool = False

    @classmethod
    def of(cls, count: int, width: int, device: torch.device) -> Rows:
        few, some = min(count, FEW_ROWS), min(count, TENSOR_ROWS)
        return cls(
            (
                torch.zeros(few, 2, width // 8, dtype=torch.int32, device=device),
                torch.zeros(few, width // 32, device=device),
                torch.zeros(few, width // 32, dtype=torch.int32, device=device),
            ),
            torch.zeros(some, width, dtype=torch.float16, device=device),
            torch.zeros(count, width, dtype=HALF, device=device),
            torch.zeros(some, width, device=device),
            torch.zeros(few, rows.half_norm_parts(width), device=device),
        )

    def few(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first int8 rows."""
        codes, scales, sums = self.quantised
        return codes[:count], scales[:count], sums[:count]

    def targets(self, count: int, weights: Sequence[DeviceWeight]) -> dict[str, Any]:
        """Which forms a kernel is to write for so many rows that these weights read."""
        floats = [weight.layout is None for weight in weights]
        if count > TENSOR_ROWS or (not are_few(count) and all(floats)):
            return {"half": self.half[:count]}
        wanted: dict[str, Any] = {}
        if not are_few(count):
            wanted |= {"half": self.tensor[:count], "ordered": True}
        else:
            wanted["quantised"] = self.few(count)
        if any(floats):
            wanted["out"] = self.full[:count]
        return wanted


class CudaProgram:
    """Computes rows on a device: decoding batches, and prompt chunks.

    Args:
        model: bound; for its configuration and rotary embeddings.
        weights: on the device.
        pool: where K and V are, on the device.
        device: all of it; the CPU under triton's interpreter, for tests.
        vocab_size: tokens that may be chosen.
        max_rows: rows of a pass at most.
        max_batch: sequences that decode together at most.
        slots: sequences that are known at once.
        pdl: programmatic dependent launch.

    Attributes:
        ring: int32 [RING, FIELDS * max_batch] in pinned memory; `decode` takes the entry
            `turn % RING` of it.
        results: int32 [RING, max_batch] in pinned memory; there it leaves the tokens.
        turn: how often `decode` ran; who replays a capture of it counts that here.
        context: positions a sequence may have.
        failures: kernels that did not compile or launch, and have been replaced by plainer ones.
        edits: penalties and biases, once `make_edits` was called.
        newest: which of the two residual streams the last pass ended in; who replays a capture of
            `chunks` sets what it was.
    """

    # Rows that tensor cores' products are cut for, and heads that a program makes ready at a time;
    # `None`: by the number of rows.
    _as_rows: int | None = None
    _heads_together: int | None = None

    def __init__(
        self,
        model: CausalLM,
        weights: DeviceModel,
        pool: KvPool,
        *,
        device: torch.device,
        vocab_size: int,
        max_rows: int,
        max_batch: int,
        slots: int,
        pdl: bool,
    ) -> None:
        config = self.config = model.config
        self.device, self.pdl, self.context = device, pdl, model.context_length
        self._weights, self._pool = weights, pool
        self.vocab_size, self.max_batch = vocab_size, max_batch
        self.max_rows = max(max_rows, max_batch)
        self._group_of = {
            layer: index for index, group in enumerate(pool.groups) for layer in group.layers
        }
        blocks = -(-(model.context_length + max_rows) // pool.block_tokens)
        zeros = self._zeros
        self.tables = [zeros(slots, blocks, dtype=torch.int32) for _ in pool.groups]
        self.rings = [
            zeros(slots, dtype=torch.int32) if group.window is not None else None
            for group in pool.groups
        ]
        self.last = zeros(slots, dtype=torch.int32)
        positions = torch.arange(model.context_length + 1)
        self._ropes = [
            tuple(part.to(device) for part in cos_sin(frequencies, scale, positions))
            for frequencies, scale in model.ropes
        ]
        self._x = [zeros(self.max_rows, config.embedding) for _ in range(2)]
        self._make_room(self.max_rows)
        self._selected = zeros(max_batch, config.embedding)
        self.logits = zeros(max_batch, config.vocab_size)
        self.tokens = zeros(self.max_rows, dtype=torch.int32)
        self.next_tokens = zeros(max_batch, dtype=torch.int32)
        self.fields = zeros(FIELDS * max_batch, dtype=torch.int32)
        pin = device.type == "cuda"
        self.ring = torch.zeros(RING, FIELDS * max_batch, dtype=torch.int32, pin_memory=pin)
        self.results = torch.zeros(RING, max_batch, dtype=torch.int32, pin_memory=pin)
        self.turn = 0
        self.failures: list[str] = []
        self._struck: set[str] = set()
        self._turn = zeros(1, dtype=torch.int32)
        self.edits: SlotEdits | None = None
        self._decode_scratch: dict[tuple[int, int], attention.DecodeScratch] = {}
        self._choice_scratch: dict[int, ChoiceScratch] = {}
        self.newest = 0

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _make_room(self, count: int) -> None:
        """Buffers of a pass of so many rows."""
        config, zeros = self.config, self._zeros
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self._y = zeros(count, config.embedding)
        self._qkv = zeros(count, width)
        self._q = zeros(count, config.heads, config.head_dim, dtype=QUERY)
        self._normed = self._rows(count, config.embedding)
        self._attended = self._rows(count, config.heads * config.head_dim)
        self._gated = self._rows(count, config.feed_forward)
        self._chosen = self._rows(min(count, TENSOR_ROWS), config.embedding)
        self._make_products_room(count)

    def _rows(self, count: int, width: int) -> Rows:
        return Rows.of(count, width, self.device)

    def _make_products_room(self, count: int) -> None:
        width, weights, zeros = 2 * self.config.feed_forward, self._weights, self._zeros
        some, many = min(count, TENSOR_ROWS), count > FEW_ROWS
        self._gate_up = zeros(some, width)
        self._gate_up_half = zeros(count, width, dtype=HALF)
        self._dense = zeros(weights.largest if many else 0, dtype=HALF)
        self._partial = zeros(most_partial_sums(weights.widest, some) if many else 0)

    def field(self, number: int, count: int) -> Tensor:
        """One field of the batch, int32 [count]."""
        start = number * self.max_batch
        return self.fields[start : start + count]

    def float_field(self, number: int, count: int) -> Tensor:
        return self.field(number, count).view(torch.float32)

    # What steps are made of.

    def reach(self, position: int) -> int:
        """Positions that a decode step is made for which has this as its last."""
        return min(SHORT if position < SHORT else self.context, self.context)

    def decode(self, form: Form) -> None:
        """One token of each of some sequences, by an entry of `ring`, chosen into `results`."""
        count, reach = form.count, form.reach
        self.turn += 1
        receive(self.ring, self._turn, self.fields)
        slots, positions = self.field(SLOT, count), self.field(POSITION, count)
        self._embed(self.field(FRESH, count), slots, count)
        attend = self._attend_rows(slots, positions, self._scratch(count, reach))
        self._layers(count, slots, positions, attend)
        self._head(self._x[self.newest][:count])
        self._choose(form)
        remember(
            *(self.next_tokens[:count], slots, self.last),
            results=self.results,
            turn=self._turn,
            pdl=self.pdl,
        )

    def chunks(
        self, slots: Tensor, positions: Tensor, fresh: Tensor, spans: Tensor, longest: int
    ) -> None:
        """Rows of some sequences, prompt chunks among them.

        Args:
            slots: int32 [rows].
            positions: int32 [rows].
            fresh: int32 [rows], tokens; below 0: what the sequence chose last.
            spans: int32 [chunks, 4], as `attention.prefill` takes them.
            longest: rows of a chunk at most.
        """
        count = len(slots)
        self._embed(fresh, slots, count)

        def attend(index: int, group: int, **forms: Any) -> None:
            attention.prefill(
                self._q[:count],
                self._pool.keys[index],
                self._pool.values[index],
                self.tables[group],
                self.rings[group],
                spans,
                longest,
                window=self._pool.groups[group].window,
                cap=self.config.attention_softcap,
                scales=self._pool.scales.get(index),
                **forms,
            )

        self._layers(count, slots, positions, attend)

    def head(self, index: Tensor) -> None:
        """Logits of some rows of the last pass, at most `max_batch`: int64 numbers of rows."""
        chosen = self._selected[: len(index)]
        torch.index_select(self._x[self.newest], 0, index, out=chosen)
        self._head(chosen)

    def choose(self, form: Form) -> None:
        """A token for each of the first rows of `logits`, by `fields`."""
        self._choose(form)
        remember(self.next_tokens[: form.count], self.field(SLOT, form.count), self.last)

    def make_edits(self) -> SlotEdits:
        """Room for penalties and biases, of which there is none before the first is asked for."""
        if self.edits is None:
            self.edits = SlotEdits(len(self.last), self.vocab_size, self.device)
        return self.edits

    def _choose(self, form: Form) -> None:
        count = form.count
        scratch = self._choice_scratch.get(count)
        if scratch is None:
            scratch = ChoiceScratch.of(count, self.vocab_size, self.device)
            self._choice_scratch[count] = scratch
        logits, tokens = self.logits[:count, : self.vocab_size], self.next_tokens[:count]
        cap, slots = self.config.final_softcap, self.field(SLOT, count)
        edits = self.make_edits().arrays if form.edited else None
        if edits is not None:
            choice.edit(logits, edits, slots, self.field(HOLDING, count), cap=cap, pdl=self.pdl)
            cap = 0.0  # applied
        if form.sampled:
            start = SEED * self.max_batch
            draws = Draws(
                temperature=self.float_field(TEMPERATURE, count),
                top_k=self.field(TOP_K, count),
                top_p=self.float_field(TOP_P, count),
                min_p=self.float_field(MIN_P, count),
                seeds=self.fields[start : start + 2 * count].view(count, 2),
                outputs=self.field(OUTPUT, count),
                indices=self.field(INDEX, count),
            )
            sample(logits, draws, tokens, scratch, cap=cap, searches=form.searches, pdl=self.pdl)
        else:
            greedy(logits, tokens, scratch, cap=cap, pdl=self.pdl)
        if edits is not None:
            choice.count(tokens, slots, edits.counts, pdl=self.pdl)

    # How.

    def _embed(self, fresh: Tensor, slots: Tensor, count: int) -> None:
        tokens = self.tokens[:count]
        first_tokens(fresh, slots, self.last, tokens)
        self.newest = 0
        scale = self.config.embedding_scale
        out = self._x[0][:count]
        embedding_rows(self._weights.embedding, tokens, scale, out, pdl=self.pdl)

    def _scratch(self, count: int, reach: int) -> attention.DecodeScratch:
        scratch = self._decode_scratch.get((count, reach))
        if scratch is None:
            splits = attention.decode_splits(count, self.config.kv_heads, reach)
            scratch = self._decode_scratch[count, reach] = self._new_scratch(count, splits)
        return scratch

    def _new_scratch(self, count: int, splits: int) -> attention.DecodeScratch:
        config = self.config
        return attention.DecodeScratch.of(
            count, config.heads, config.kv_heads, config.head_dim, splits, self.device
        )

    def _attend_rows(
        self,
        slots: Tensor,
        positions: Tensor,
        scratch: attention.DecodeScratch,
        *,
        siblings: bool = False,
    ) -> Callable[..., None]:
        """Attention of each row on its own; see `attention.decode`."""

        def attend(index: int, group: int, **forms: Any) -> None:
            attention.decode(
                self._q[: len(slots)],
                self._pool.keys[index],
                self._pool.values[index],
                self.tables[group],
                self.rings[group],
                slots,
                positions,
                scratch,
                window=self._pool.groups[group].window,
                cap=self.config.attention_softcap,
                scales=self._pool.scales.get(index),
                siblings=siblings,
                pdl=self.pdl,
                **forms,
            )

        return attend

    def _layers(
        self, count: int, slots: Tensor, positions: Tensor, attend: Callable[..., None]
    ) -> None:
        config, waiting = self.config, False
        post: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            inputs = layer.qkv.weights
            self._norm(count, layer.norm, self._normed, inputs, added=waiting, post=post)
            self._multiply(layer.qkv, self._normed, count, self._qkv)
            group = self._group_of[index]
            rows.heads(
                self._qkv[:count],
                self._q[:count],
                self._pool.keys[index],
                self._pool.values[index],
                self.tables[group],
                self.rings[group],
                slots,
                positions,
                *self._ropes[layer.rope],
                scale=config.query_scale,
                interleaved=config.architecture.interleaved_rope,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.norm_eps,
                scales=self._pool.scales.get(index),
                tile=self._heads_together,
                pdl=self.pdl,
            )
            targets = self._attended.targets(count, layer.output.weights)
            if config.head_dim % 32 and "quantised" in targets:
                attend(index, group, out=self._attended.full[:count])
                quantised = targets["quantised"]
                rows.quantise(self._attended.full[:count], quantised, pdl=self.pdl)
            else:
                attend(index, group, **targets)
            post = layer.post_norm
            waiting = self._join(layer.output, self._attended, count, post)
            inputs = layer.gate_up.weights
            self._norm(count, layer.ff_norm, self._normed, inputs, added=waiting, post=post)
            self._gate(layer, count)
            post = layer.ff_post_norm
            waiting = self._join(layer.down, self._gated, count, post)
        if not waiting:
            return
        # The last result joins all rows; the head norms those that are wanted.
        x, into = self._x[self.newest][:count], self._x[1 - self.newest][:count]
        rows.norm(
            x, None, config.norm_eps, out=None, added=self._y[:count], post_weight=post,
            into=into, pdl=self.pdl,
        )  # fmt: skip
        self.newest = 1 - self.newest

    def _join(self, products: Products, x: Rows, count: int, post: Tensor | None) -> bool:
        """A product that is to be added to the rows; whether that is left to the next norm."""
        if post is None and self._as_rows is None and are_few(count):
            self._multiply(products, x, count, self._x[self.newest], residual=True)
            return False
        self._multiply(products, x, count, self._y)
        return True

    def _norm(
        self,
        count: int,
        weight: Tensor,
        target: Rows,
        inputs: Sequence[DeviceWeight],
        *,
        added: bool,
        post: Tensor | None,
    ) -> None:
        x = self._x[self.newest][:count]
        if not added:
            self._norm_of(x, weight, target, inputs)
            return
        into = self._x[1 - self.newest][:count]
        rows.norm(
            x,
            weight,
            self.config.norm_eps,
            added=self._y[:count],
            post_weight=post,
            into=into,
            pdl=self.pdl,
            **target.targets(count, inputs),
        )
        target.half_normed = False
        self.newest = 1 - self.newest

    def _norm_of(
        self, x: Tensor, weight: Tensor, target: Rows, inputs: Sequence[DeviceWeight]
    ) -> None:
        """Norm of rows to which nothing is added."""
        targets = target.targets(len(x), inputs)
        target.half_normed = list(targets) == ["quantised"]
        if target.half_normed:
            squares = target.squares[: len(x)]
            rows.half_norm(x, weight, targets["quantised"], squares, pdl=self.pdl)
        else:
            rows.norm(x, weight, self.config.norm_eps, pdl=self.pdl, **targets)

    def _gate(self, layer: DeviceLayer, count: int) -> None:
        activation, width = self.config.architecture.activation, self.config.feed_forward
        (first, *others), down = layer.gate_up.parts, layer.down.weights
        if are_few(count) and not others and first.bias is None:
            gate, up = first.weight.slice(0, width), first.weight.slice(width, 2 * width)
            # Float weights read the result as it is; it is quantised for others.
            out = self._gated.full[:count]
            source = self._source(gate, self._normed, count)
            how = {"up": up, "activation": activation, **self._completing(self._normed, count)}
            few_rows(gate, source, out, pdl=self.pdl, **how)
            if down[0].layout is not None:
                rows.quantise(out, self._gated.few(count), pdl=self.pdl)
            return
        both = self._gate_up_half if count > TENSOR_ROWS else self._gate_up
        self._multiply(layer.gate_up, self._normed, count, both)
        targets = self._gated.targets(count, down)
        rows.gate(both[:count], activation, pdl=self.pdl, **targets)

    def _completing(self, x: Rows, count: int) -> dict[str, Any]:
        """What a product needs that completes a norm."""
        if not x.half_normed:
            return {}
        return {"squares": x.squares[:count], "eps": self.config.norm_eps}

    @staticmethod
    def _source(weight: DeviceWeight, x: Rows, count: int) -> Any:
        return x.full[:count] if weight.layout is None else x.few(count)

    def _multiply(
        self, products: Products, x: Rows, count: int, out: Tensor, *, residual: bool = False
    ) -> None:
        """All parts of a matrix, side by side; few rows may be added to what is there."""
        out, column = out[:count], 0
        if count > TENSOR_ROWS:
            self._dense_rows(products, x.half[:count], out)
            return
        if are_few(count) and products.are_a_pair and not residual:
            one, other = (part.weight for part in products.parts)
            how = self._completing(x, count)
            few_rows(one, x.few(count), out, beside=other, pdl=self.pdl, **how)
            return
        for product in products.parts:
            weight, bias = product.weight, product.bias
            if are_few(count):
                source = self._source(weight, x, count)
                before = out[:, column:] if residual else None
                how = {"bias": bias, "residual": before, "out_offset": column}
                few_rows(weight, source, out, pdl=self.pdl, **how, **self._completing(x, count))
            elif weight.layout is not None:
                self._tensor_rows(product, x.tensor[:count], out, column)
            else:
                half = x.half[:count]
                if any(each.layout is not None for each in products.weights):
                    half.copy_(x.full[:count])  # its form for the others is float16
                part = Products([product])
                self._dense_rows(part, half, out[:, column : column + weight.rows])
            column += weight.rows

    def _tensor_rows(self, product: Product, x: Tensor, out: Tensor, column: int) -> None:
        weight = product.weight
        rows = self._as_rows or len(x)
        how: dict[str, Any] = {"bias": product.bias, "out_offset": column, "as_rows": rows}
        how["pdl"] = self.pdl
        if weight.form not in self._struck:
            try:
                tensor_rows(weight, x, out, self._partial, **how)
            except Exception as error:  # whatever a compiler or a driver may raise
                if tensor_default(weight, rows) == tensor_default(weight, rows, plain=True):
                    raise
                self._struck.add(weight.form)
                self.failures.append(f"the product of {weight.form} with copies ahead: {error!r}")
            else:
                return
        plain = tensor_default(weight, rows, plain=True)
        tensor_rows(weight, x, out, self._partial, config=plain, **how)

    def _dense_rows(self, products: Products, x: Tensor, out: Tensor) -> None:
        matrix = products.dense
        if matrix is None:
            matrix = products.unpacked(self._dense)
        column = 0
        _dense_product(x, matrix, out)
        for product in products.parts:
            if product.bias is not None:
                out[:, column : column + product.weight.rows].add_(product.bias)
            column += product.weight.rows

    def _head(self, x: Tensor) -> None:
        head = Products([Product(self._weights.head, None)])
        most = len(self._chosen.tensor)
        for start in range(0, len(x), most):
            part = x[start : start + most]
            self._norm_of(part, self._weights.output_norm, self._chosen, head.weights)
            self._multiply(head, self._chosen, len(part), self.logits[start : start + len(part)])


def _dense_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out = x @ weight.T`, bfloat16 operands, float32 sums; the result is that or bfloat16."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.device.type == "cuda":
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(x.float() @ weight.float().t())
