"""`CpuProgram`: a model's whole step as one list of phases that compiled kernels work through.

At load every weight becomes tiles, every buffer gets its place, and each operation of each layer
becomes a record that a kernel reads (`kernels/cpu/step.py`). A step then writes down its rows and
asks the team once, without Python until all is done. What a step is told and what it chooses has
two places, so that one may be written and read while the next is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.cpu import layers, sampling, step
from asyncllm.kernels.cpu.compiled import KernelLibrary
from asyncllm.kernels.cpu.isa import Isa
from asyncllm.kernels.cpu.products import quantised_bytes
from asyncllm.kernels.cpu.team import Team
from asyncllm.kernels.cpu.tiles import TILE_ROWS
from asyncllm.runner.cpu_weights import Tiles
from asyncllm.runner.runner import LOGITS_ROWS
from asyncllm.scheduler.step import StepInterrupted

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.attention import Attention
    from asyncllm.model.causal_lm import CausalLM, Layer
    from asyncllm.model.config import ModelConfig
    from asyncllm.model.feed_forward import FeedForward
    from asyncllm.model.linear import Linear
    from asyncllm.model.program import Chunk
    from asyncllm.sampling.state import Draw

# Rows of activations that go with some tiles at a time: they stay in a core's second cache.
ROW_BLOCK: Final = 64

# Units a thread should find in a phase: more even out, fewer cost less.
UNITS_PER_THREAD: Final = 4

# Queries that share the loading of keys and values.
ATTENTION_LINES: Final = 8

# A step is looked after between layers about this often.
LOOK_AFTER_S: Final = 0.25


def refusal(config: ModelConfig, block_tokens: int) -> str | None:
    """Why the fused step cannot serve a model, or `None` if it can."""
    widths = {
        "embedding width": config.embedding,
        "head width": config.head_dim,
        "feed-forward width": config.feed_forward,
        "block_tokens": block_tokens,
    }
    for name, width in widths.items():
        if width % 16:
            return f"{name} {width} is no multiple of 16"
    return None


class _Rules:
    """By which work is cut into units, each once."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []

    def number(self, kind: str, size: int = 0) -> int:
        rule = (kind, size)
        if rule not in self.all:
            self.all.append(rule)
        return self.all.index(rule)


class CpuProgram:
    """Computes a step's rows with compiled kernels, K and V in the pool.

    Args:
        model: bound; its matrices are not needed afterwards.
        tiles: its matrices, see `pack_model`.
        pool: where K and V are; their layout inside a block is this program's own.
        library: compiles kernels or finds them compiled.
        isa: which form of the kernels.
        vocab_size: tokens that may be chosen.
        max_rows: rows of a pass at most, over all sequences.
        max_sequences: sequences of a pass at most.
        threads: that work on a step.
        helps: whether the caller's is one of them.
        should_stop: asked between layers where a step is long; ends it with `StepInterrupted`.

    Attributes:
        weights_bytes: bytes of all tiles.
    """

    def __init__(
        self,
        model: CausalLM,
        tiles: dict[str, Tiles],
        pool: KvPool,
        *,
        library: KernelLibrary,
        isa: Isa,
        vocab_size: int,
        max_rows: int,
        max_sequences: int,
        threads: int,
        helps: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = model.config
        self.max_rows = max_rows
        self._pool, self._library, self._isa = pool, library, isa
        self._threads, self._should_stop = threads, should_stop
        self._vocab_size = vocab_size
        self._kv_kind = str(next(iter(pool.keys.values())).dtype).removeprefix("torch.")
        self._keep: list[Any] = []  # what records hold addresses of
        self._rules = _Rules()
        self._segments: list[tuple[int, int, int]] = []
        self._phases: list[tuple[int, int]] = []
        self._seconds_per_row_and_layer = 0.0

        self._tiles = dict(tiles)
        self.weights_bytes = sum(each.data.nbytes for each in self._tiles.values())
        self._buffers(model, max_sequences)
        self._layer_ends: list[int] = []
        self._begin(model)
        before = None
        for index, layer in enumerate(model.layers):
            self._layer(index, layer, before)
            self._layer_ends.append(len(self._phases))
            before = layer
        # The last layer's result is added to all rows: any may be asked for.
        self._norm(None, model.layers[-1].feed_forward.post_norm, False, added=True)
        self._body = len(self._phases)
        self._head(model)
        phases, segments = (np.array(table, np.int64) for table in (self._phases, self._segments))
        self._step = np.zeros(step.RULES + 2 * len(self._rules.all), np.int64)
        self._cut_for: tuple[int, int, int] | None = None
        self._team = Team(library, phases, segments, self._step, threads, helps=helps)

    @property
    def threads(self) -> int:
        """How many work on a step."""
        return self._team.size

    @property
    def in_background(self) -> bool:
        """Whether a step goes on while nobody waits for it."""
        return bool(self._team.threads)

    def close(self) -> None:
        """End the threads and let go of the weights. Idempotent."""
        self._team.close()
        self._tiles.clear()

    # What a step does.

    def forward(
        self,
        chunks: Sequence[Chunk],
        wanted: Sequence[int] = (),
        draws: Sequence[Draw | None] = (),
    ) -> Tensor:
        """One pass over the weights for all the chunks' rows, and the logits of those wanted.

        Args:
            chunks: rows of some sequences.
            wanted: rows whose logits will be asked for next.
            draws: how a token of each of these is chosen.

        Returns:
            Hidden states before the last norm, float32 [rows, embedding].

        Raises:
            StepInterrupted: `should_stop` said so.
            ValueError: more rows than were asked for when this was made.
        """
        rows = self._write(chunks, wanted, draws)
        started = perf_counter()
        self._run_layers(rows, len(self._phases) if wanted else self._body)
        taken = perf_counter() - started
        self._seconds_per_row_and_layer = taken / (rows * len(self._layer_ends))
        return self._x_tensor[:rows]

    def begin(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> tuple[int, int]:
        """Begin a pass that chooses a token for each row, one of each sequence; for `finish`.

        The pass before must be finished, or have had the same sequences. In that case a token of -1
        is the one it chooses.

        Args:
            chunks: of one token each.
            draws: how the next is chosen.
        """
        self._write(chunks, range(len(chunks)), draws)
        return self._team.begin(0, len(self._phases)), self._turn

    def finish(self, begun: tuple[int, int], count: int) -> list[tuple[int, float]]:
        """Wait for a pass, one of the last two, and give what `choices` would of its rows."""
        asked, turn = begun
        self._team.wait(asked)
        return self._chosen_at(turn, count)

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of some rows of the last pass, float32 [rows, vocabulary], valid until the next.

        Args:
            rows: at most `LOGITS_ROWS`.
        """
        self._make_logits(rows)
        return self._logits_tensor[: len(rows)]

    def choices(self, rows: Sequence[int], draws: Sequence[Draw | None]) -> list[tuple[int, float]]:
        """The chosen token of each row, and its logit, which is no number where none could be."""
        self._make_logits(rows, draws)
        return self._chosen_at(self._turn, len(rows))

    def _chosen_at(self, turn: int, count: int) -> list[tuple[int, float]]:
        tokens, peaks = (each[turn % 2, :count].tolist() for each in (self._best, self._peaks))
        return [(max(token, 0), peak) for token, peak in zip(tokens, peaks, strict=True)]

    def _make_logits(self, rows: Sequence[int], draws: Sequence[Draw | None] = ()) -> None:
        if self._made == tuple(rows):
            return
        self._choose_rows(rows, draws)
        self._cut(int(self._step[step.ROWS]), len(rows))
        self._team.run(self._body, len(self._phases) - self._body)

    def _choose_rows(self, rows: Sequence[int], draws: Sequence[Draw | None]) -> None:
        # The kernels cap logits in place, and the sampler writes into them: made once, used once.
        self._made: tuple[int, ...] = tuple(rows)
        places = self._draws[self._turn % 2]
        for index, row in enumerate(rows):
            self._chosen[index] = row
            places[index, 0] = 0.0  # the most likely token
        for index, draw in enumerate(draws):
            if draw is not None and draw.temperature > 0:
                places[index, : len(draw)] = draw

    def _run_layers(self, rows: int, end: int) -> None:
        estimate = self._seconds_per_row_and_layer * rows
        count = len(self._layer_ends)
        at_once = count if estimate == 0 else max(1, int(LOOK_AFTER_S / estimate))
        first = 0
        for number in range(at_once, count, at_once):
            last = self._layer_ends[number - 1]
            self._team.run(first, last - first)
            first = last
            if self._should_stop():
                raise StepInterrupted(f"before layer {number}")
        self._team.run(first, end - first)

    def _write(
        self, chunks: Sequence[Chunk], wanted: Sequence[int], draws: Sequence[Draw | None]
    ) -> int:
        rows = self._write_rows(chunks)
        self._choose_rows(wanted, draws)
        self._cut(rows, max(1, len(wanted)))
        return rows

    def _write_rows(self, chunks: Sequence[Chunk]) -> int:
        row = tile = 0
        wide = max(1, ATTENTION_LINES // (self.config.heads // self.config.kv_heads))
        rows = sum(len(chunk.tokens) for chunk in chunks)
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"a pass of {rows} rows; room is for 1 to {self.max_rows}")
        self._turn += 1
        tokens, positions = self._new[self._turn % 2]
        slots, tiles = self._slots, self._attended
        for slot, chunk in enumerate(chunks):
            self._write_tables(slot, chunk.tables)
            count = len(chunk.tokens)
            if count == 1:
                tokens[row], positions[row], slots[row] = chunk.tokens[0], chunk.offset, slot
            else:
                tokens[row : row + count] = chunk.tokens
                positions[row : row + count] = range(chunk.offset, chunk.offset + count)
                slots[row : row + count] = slot
            for start in range(0, count, wide):
                tiles[tile, 0], tiles[tile, 1] = row + start, min(wide, count - start)
                tile += 1
            row += count
        self._tile_count = tile
        return rows

    def _write_tables(self, slot: int, tables: Sequence[Sequence[int]]) -> None:
        held = self._held[slot]
        if held is tables:
            return
        for group, table in enumerate(tables):
            old: Sequence[int] = held[group] if held else ()
            place = self._tables[group][slot]
            # First what numbers of blocks are taken modulo, then the blocks.
            place[0] = len(table) if self._pool.groups[group].window is not None else 0
            place = place[1:]
            for index, block in enumerate(table):
                if index >= len(old) or old[index] != block:
                    place[index] = block
        self._held[slot] = tables

    def _cut(self, rows: int, chosen: int) -> None:
        """Say how work is cut into units."""
        key = (rows, chosen, self._tile_count)
        if key == self._cut_for:
            return
        self._cut_for = key
        words, units = self._step, UNITS_PER_THREAD * self._threads
        words[step.ROWS], words[step.CHOSEN] = rows, chosen
        words[step.ROW_BLOCK] = ROW_BLOCK
        for number, (kind, size) in enumerate(self._rules.all):
            total, least, blocks = rows, 1, 1
            if kind == "tiles":
                total, blocks = size, -(-rows // ROW_BLOCK)
            elif kind == "pairs":
                total, blocks, least = size, -(-rows // ROW_BLOCK), 2
            elif kind == "head tiles":
                total, blocks = size, -(-chosen // ROW_BLOCK)
            elif kind == "chosen":
                total = chosen
            elif kind == "heads":
                total = rows * size
            elif kind == "once":
                total = 1
            if kind == "each chosen":
                count, each = chosen, 1
            elif kind == "attention":
                grouped = self.config.heads // self.config.kv_heads
                # Few sequences: each head alone, so that every thread has some.
                each = grouped if self._tile_count * self.config.kv_heads >= units else 1
                count = self._tile_count * (self.config.heads // each)
            else:
                wanted = 1 if self._threads == 1 and kind != "chosen" else units
                each = -(-total // max(1, wanted // blocks))
                each = max(1, -(-each // least)) * least
                count = -(-total // each) * blocks
            words[step.RULES + 2 * number], words[step.RULES + 2 * number + 1] = count, each

    # How a step is put together.

    def _buffers(self, model: CausalLM, max_sequences: int) -> None:
        config, rows = model.config, self.max_rows
        size = self._pool.block_tokens
        q_width = config.heads * config.head_dim
        self._x = self._floats(rows, config.embedding)
        self._x_tensor = torch.from_numpy(self._x)
        self._normed = self._floats(rows, config.embedding)
        self._quantised = self._bytes(rows, quantised_bytes(config.embedding))
        heads = config.heads + 2 * config.kv_heads
        self._qkv = self._floats(rows, heads * config.head_dim)
        self._out = self._floats(rows, config.embedding)
        self._attention_out = self._floats(rows, q_width)
        self._attention_quantised = self._bytes(rows, quantised_bytes(q_width))
        self._gate_up = self._floats(rows, 2 * config.feed_forward)
        self._gated_quantised = self._bytes(rows, quantised_bytes(config.feed_forward))
        head_rows = -(-config.vocab_size // TILE_ROWS) * TILE_ROWS
        self._logits = self._floats(LOGITS_ROWS, head_rows)
        self._logits_tensor = torch.from_numpy(self._logits)
        # Of the steps that have been told what to do; odd and even ones have places of their own.
        self._turn = 0
        self._new = self._whole(2, 2, rows)  # tokens, positions
        self._draws = _aligned((2, LOGITS_ROWS, sampling.DRAW_BYTES // 8), np.float64)
        self._best, self._peaks = self._whole(2, LOGITS_ROWS), self._floats(2, LOGITS_ROWS)
        self._chosen = self._whole(LOGITS_ROWS)
        self._tokens, self._positions, self._slots = (self._whole(rows) for _ in range(3))
        self._attended = self._whole(rows, 2)
        self._tile_count = 0
        self._tables = []
        blocks = -(-(model.context_length + rows) // size)
        self._tables = [self._whole(max_sequences, 1 + blocks) for _ in self._pool.groups]
        self._held: list[Sequence[Sequence[int]] | None] = [None] * max_sequences
        self._angles = []
        for frequencies, scale in model.ropes:
            held = np.ascontiguousarray(frequencies.double().numpy())
            self._keep.append(held)
            self._angles.append((held, scale, self._floats(rows, 2 * len(held))))
        # Keys a query may see, and behind them the sum of their weights.
        keys = -(-(model.context_length + rows) // 16) * 16 + 16
        lines = max(ATTENTION_LINES, config.heads // config.kv_heads)
        floats = lines * 2 * config.head_dim + 2 * keys + lines * keys
        self._score_stride = 4 * keys
        self._scratch = self._floats(self._threads, floats)

    def _floats(self, *shape: int) -> Any:
        return _aligned(shape, np.float32)

    def _bytes(self, *shape: int) -> Any:
        return _aligned(shape, np.uint8)

    def _whole(self, *shape: int) -> Any:
        return _aligned(shape, np.int64)

    def _kernel(self, name: str, make: Callable[[], layers.Kernel]) -> int:
        return self._library.address(name, make)

    def _record(self, fields: Any, **values: float) -> int:
        """A record of a kernel's parameters; fields not given are 0."""
        words = np.zeros(len(fields._fields), np.int64)
        for name, value in values.items():
            place = fields._fields.index(name)
            if isinstance(value, float):
                (word,) = struct.unpack("<i", struct.pack("<f", value))
                words.view(np.int32)[2 * place] = word
            else:
                words[place] = value
        self._keep.append(words)
        address: int = words.ctypes.data
        return address

    def _phase(self, *segments: tuple[int, int, int]) -> None:
        self._phases.append((len(self._segments), len(segments)))
        self._segments += segments

    def _vector(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        held = np.ascontiguousarray(tensor.float().numpy())
        padded = np.zeros(-(-len(held) // 16) * 16, np.float32)
        padded[: len(held)] = held
        self._keep.append(padded)
        address: int = padded.ctypes.data
        return address

    def _begin(self, model: CausalLM) -> None:
        once = self._rules.number("once")
        new = self._new[0]
        record = self._record(
            step.ARRIVAL,
            new_tokens=new[0].ctypes.data,
            new_positions=new[1].ctypes.data,
            new_stride=self._new.strides[0],
            results=self._best.ctypes.data,
            results_stride=self._best.strides[0],
            tokens=self._tokens.ctypes.data,
            positions=self._positions.ctypes.data,
            rule=once,
        )
        self._phase((self._kernel("arrival", layers.arrival), record, once))
        tiles = self._tiles[model.embedding.name]
        rule = self._rules.number("rows")
        embedding = self._record(
            step.EMBEDDING,
            tiles=tiles.data.ctypes.data,
            tile_bytes=tiles.data.shape[1],
            columns=tiles.columns,
            tokens=self._tokens.ctypes.data,
            scale=float(model.config.embedding_scale),
            out=self._x.ctypes.data,
            out_stride=self._x.strides[0],
            rule=rule,
        )
        name = f"embedding-{tiles.form}-{self._isa.name}"
        kernel = self._kernel(name, lambda: layers.embedding(self._isa, tiles.form))
        segments = [(kernel, embedding, rule)]
        for frequencies, scale, out in self._angles:
            record = self._record(
                step.ANGLES,
                positions=self._positions.ctypes.data,
                frequencies=frequencies.ctypes.data,
                scale=float(scale),
                half=len(frequencies),
                out=out.ctypes.data,
                stride=out.strides[0],
                rule=rule,
            )
            segments.append((self._kernel("angles", layers.angles), record, rule))
        self._phase(*segments)

    def _layer(self, index: int, layer: Layer, before: Layer | None) -> None:
        self._norm(
            layer.attention.norm,
            before.feed_forward.post_norm if before else None,
            self._inputs(layer.attention.projections),
            added=before is not None,
        )
        self._attend(index, layer.attention, layer.rope)
        self._norm(
            layer.feed_forward.norm,
            layer.attention.post_norm,
            self._inputs(layer.feed_forward.gate_up),
            added=True,
        )
        self._feed_forward(layer.feed_forward)

    def _inputs(self, linears: Sequence[Linear]) -> bool:
        """Whether any of these layers takes int8 activations."""
        return any(self._tiles[linear.weight.name].quantised for linear in linears)

    def _norm(
        self, weight: Tensor | None, post: Tensor | None, quantised: bool, *, added: bool
    ) -> None:
        rule = self._rules.number("rows")
        record = self._record(
            step.NORM,
            x=self._x.ctypes.data,
            x_stride=self._x.strides[0],
            added=self._out.ctypes.data if added else 0,
            added_stride=self._out.strides[0],
            post_weight=self._vector(post),
            weight=self._vector(weight),
            columns=self.config.embedding,
            eps=float(self.config.norm_eps),
            out=self._normed.ctypes.data,
            out_stride=self._normed.strides[0],
            quantised=self._quantised.ctypes.data if quantised else 0,
            quantised_stride=self._quantised.strides[0],
            rows=step.ROWS,
            rule=rule,
        )
        self._phase((self._kernel("norm", layers.norm), record, rule))

    def _product(
        self, tiles: Tiles, x: Any, quants: Any, out: int, out_stride: int, *, bias: int = 0,
        first: int = 0, count: int | None = None, kind: str = "tiles", rows: int = step.ROWS,
    ) -> tuple[int, int, int]:  # fmt: skip
        """A segment: some tiles of a weight times all rows."""
        source = quants if tiles.quantised else x
        count = len(tiles.data) if count is None else count
        rule = self._rules.number(kind, count)
        record = self._record(
            step.PRODUCT,
            tiles=tiles.data.ctypes.data + first * tiles.data.shape[1],
            tile_bytes=tiles.data.shape[1],
            count=count,
            x=source.ctypes.data,
            x_stride=source.strides[0],
            columns=tiles.columns,
            out=out,
            out_stride=out_stride,
            bias=bias,
            rule=rule,
            rows=rows,
        )
        name = f"product-{tiles.form}-{self._isa.name}"
        return self._kernel(name, lambda: layers.product(self._isa, tiles.form)), record, rule

    def _attend(self, index: int, block: Attention, rope: int) -> None:
        config, size = self.config, self._pool.block_tokens
        qkv, stride = self._qkv.ctypes.data, self._qkv.strides[0]
        segments, column = [], 0
        for linear in block.projections:
            tiles = self._tiles[linear.weight.name]
            segments.append(
                self._product(
                    *(tiles, self._normed, self._quantised, qkv + 4 * column, stride),
                    bias=self._vector(linear.bias),
                )
            )
            column += linear.outputs
        self._phase(*segments)

        number = next(n for n, group in enumerate(self._pool.groups) if index in group.layers)
        window = self._pool.groups[number].window
        tables = self._tables[number]
        paged = {
            "keys": self._pool.keys[index].data_ptr(),
            "values": self._pool.values[index].data_ptr(),
            "tables": tables.ctypes.data,
            "table_stride": tables.strides[0],
            "block_tokens": size,
            "positions": self._positions.ctypes.data,
            "slots": self._slots.ctypes.data,
        }
        shape = {
            "qkv": qkv,
            "stride": stride,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
        }
        frequencies, _, angles = self._angles[rope]
        rule = self._rules.number("heads", config.heads + 2 * config.kv_heads)
        interleaved = config.architecture.interleaved_rope
        name = f"heads-{self._kv_kind}-{interleaved}-{self._isa.name}"
        kernel = self._kernel(name, lambda: layers.heads(self._isa, self._kv_kind, interleaved))
        record = self._record(
            step.HEADS,
            **shape,
            **paged,
            rotary_half=len(frequencies),
            q_norm=self._vector(block.q_norm),
            k_norm=self._vector(block.k_norm),
            eps=float(config.norm_eps),
            query_scale=float(config.query_scale),
            angles=angles.ctypes.data,
            angles_stride=angles.strides[0],
            rule=rule,
        )
        self._phase((kernel, record, rule))

        output = self._tiles[block.output.weight.name]
        fused = output.quantised and config.head_dim % 32 == 0
        out, quants = self._attention_out, self._attention_quantised
        rule = self._rules.number("attention")
        record = self._record(
            step.ATTENTION,
            **shape,
            **paged,
            softcap=float(config.attention_softcap),
            window=window or 0,
            tiles=self._attended.ctypes.data,
            out=out.ctypes.data,
            out_stride=out.strides[0],
            quantised=quants.ctypes.data if fused else 0,
            quantised_stride=quants.strides[0],
            scratch=self._scratch.ctypes.data,
            scratch_stride=self._scratch.strides[0],
            score_stride=self._score_stride,
            rule=rule,
        )
        name = f"attention-{self._kv_kind}-{self._isa.name}"
        kernel = self._kernel(name, lambda: layers.attention(self._isa, self._kv_kind))
        self._phase((kernel, record, rule))
        if output.quantised and not fused:
            self._quantise(out, quants, output.columns)
        self._phase(
            self._product(
                *(output, out, quants, self._out.ctypes.data, self._out.strides[0]),
                bias=self._vector(block.output.bias),
            )
        )

    def _quantise(self, x: Any, out: Any, columns: int) -> None:
        rule = self._rules.number("rows")
        record = self._record(
            step.QUANTISE,
            x=x.ctypes.data,
            x_stride=x.strides[0],
            columns=columns,
            out=out.ctypes.data,
            out_stride=out.strides[0],
            rule=rule,
        )
        self._phase((self._kernel("quantise", layers.quantise), record, rule))

    def _feed_forward(self, block: FeedForward) -> None:
        config = self.config
        inner = config.feed_forward
        out, stride = self._gate_up.ctypes.data, self._gate_up.strides[0]
        count = inner // TILE_ROWS
        fused = len(block.gate_up) == 1
        parts = []
        for part in range(2):
            tiles = self._tiles[block.gate_up[0 if fused else part].weight.name]
            parts.append(
                self._product(
                    *(tiles, self._normed, self._quantised, out + 4 * part * inner, stride),
                    first=part * count if fused else 0,
                    count=count,
                    kind="pairs",
                )
            )
        (gate_kernel, gate, rule), (up_kernel, up, _) = parts
        down = self._tiles[block.down.weight.name]
        quants = self._gated_quantised
        record = self._record(
            step.GATED,
            gate_kernel=gate_kernel,
            gate=gate,
            up_kernel=up_kernel,
            up=up,
            out=out,
            up_out=out + 4 * inner,
            stride=stride,
            quantised=quants.ctypes.data if down.quantised else 0,
            quantised_stride=quants.strides[0],
            columns=inner,
            count=count,
            rule=rule,
        )
        activation = config.architecture.activation
        kernel = self._kernel(f"gated-{activation}", lambda: layers.gated(activation))
        self._phase((kernel, record, rule))
        self._phase(
            self._product(
                *(down, self._gate_up, quants, self._out.ctypes.data, self._out.strides[0])
            )
        )

    def _head(self, model: CausalLM) -> None:
        config, tiles = self.config, self._tiles[model.head.weight.name]
        rule = self._rules.number("chosen")
        normed = self._floats(LOGITS_ROWS, config.embedding)
        quants = self._bytes(LOGITS_ROWS, quantised_bytes(config.embedding))
        self._keep += [normed, quants]
        record = self._record(
            step.NORM,
            x=self._x.ctypes.data,
            x_stride=self._x.strides[0],
            weight=self._vector(model.output_norm),
            columns=config.embedding,
            eps=float(config.norm_eps),
            out=normed.ctypes.data,
            out_stride=normed.strides[0],
            quantised=quants.ctypes.data if tiles.quantised else 0,
            quantised_stride=quants.strides[0],
            chosen=self._chosen.ctypes.data,
            rows=step.CHOSEN,
            rule=rule,
        )
        self._phase((self._kernel("norm", layers.norm), record, rule))
        logits, stride = self._logits.ctypes.data, self._logits.strides[0]
        self._phase(
            self._product(
                *(tiles, normed, quants, logits, stride),
                bias=self._vector(model.head.bias),
                kind="head tiles",
                rows=step.CHOSEN,
            )
        )
        each = self._rules.number("each chosen")
        scratch = self._bytes(self._threads, sampling.scratch_bytes(self._vocab_size))
        self._keep.append(scratch)
        record = self._record(
            step.CHOICE,
            logits=logits,
            stride=stride,
            padded=self._logits.shape[1],
            count=self._vocab_size,
            softcap=float(config.final_softcap),
            draws=self._draws.ctypes.data,
            draws_stride=self._draws.strides[0],
            tokens=self._best.ctypes.data,
            tokens_stride=self._best.strides[0],
            peaks=self._peaks.ctypes.data,
            peaks_stride=self._peaks.strides[0],
            scratch=scratch.ctypes.data,
            scratch_stride=scratch.strides[0],
            rule=each,
        )
        self._phase((self._kernel("choice", sampling.choice), record, each))


def _aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros at a multiple of 64 bytes."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)
