"""The plain program's logits are those of transformers, and unsound checkpoints are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from asyncllm.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncllm.checkpoint.formats import FORMATS, Format
from asyncllm.errors import CorruptCheckpointError, UnsupportedModelError
from asyncllm.kernels.ops import Kernel, KernelTable
from asyncllm.kernels.reference import PackedWeight, padded_rows
from asyncllm.model.causal_lm import CausalLM
from asyncllm.model.config import ModelConfig
from asyncllm.model.program import Chunk
from asyncllm.scheduler.step import StepInterrupted
from tests import gguf_bytes
from tests.rig import Rig, assert_close, prompt
from tests.tiny_models import (
    CONTEXT,
    ORIGINAL_CONTEXT,
    TINY_MODELS,
    Tinies,
    Tiny,
    allocated_bytes,
    build,
    write_gguf,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for each other on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> Tinies:
    return Tinies(tmp_path_factory.mktemp("tiny"))


ALL = pytest.mark.parametrize("name", TINY_MODELS)
# Longer than the windows of 24 several times over, and than the original context of 64.
LENGTH = 100


@ALL
@pytest.mark.parametrize(
    "sizes", [(LENGTH,), (1, 7, 30, 3, 64, 11), (1,)], ids=["at-once", "odd-chunks", "by-token"]
)
def test_logits_are_those_of_transformers(
    tinies: Tinies, name: str, sizes: tuple[int, ...]
) -> None:
    tokens = prompt(LENGTH)
    rig = Rig(tinies.path(name), chunk=max(sizes))
    assert_close(rig.logits(tokens, sizes), tinies.logits(name, tokens))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 64])
def test_logits_do_not_depend_on_the_size_of_blocks(
    tinies: Tinies, name: str, block_tokens: int
) -> None:
    tokens = prompt(LENGTH)
    rig = Rig(tinies.path(name), chunk=33, block_tokens=block_tokens)
    assert_close(rig.logits(tokens, (33, 2)), tinies.logits(name, tokens))


@pytest.mark.parametrize("context", [ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1, CONTEXT])
def test_the_context_length_decides_which_longrope_factors_serve(
    tinies: Tinies, context: int
) -> None:
    name = "phi3-longrope"
    tokens = prompt(context)
    ours = Rig(tinies.path(name), context_length=context).logits(tokens, (context,))
    assert_close(ours, tinies.logits(name, tokens))


@ALL
def test_several_sequences_share_a_pass(tinies: Tinies, name: str) -> None:
    rig = Rig(tinies.path(name), chunk=64)
    prompts = [prompt(70, 1), prompt(66, 2), prompt(90, 3)]
    tables = [rig.sequence(len(tokens)) for tokens in prompts]
    done, found = [0, 0, 0], [[], [], []]  # type: tuple[list[int], list[list[Tensor]]]
    turn = 0
    while any(at < len(tokens) for at, tokens in zip(done, prompts, strict=True)):
        turn += 1
        chunks, owners = [], []
        for i, tokens in enumerate(prompts):
            size = min((17, 1, 40)[(i + turn) % 3], len(tokens) - done[i])
            if size:
                chunks.append(Chunk(tokens[done[i] : done[i] + size], done[i], tables[i]))
                owners.append(i)
                done[i] += size
        parts = torch.split(rig.run(chunks), [len(chunk.tokens) for chunk in chunks])
        for owner, part in zip(owners, parts, strict=True):
            found[owner].append(part)
    for tokens, logits in zip(prompts, found, strict=True):
        assert_close(torch.cat(logits), tinies.logits(name, tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 5e-3)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_keys_and_values_may_be_kept_in_half_precision(
    tinies: Tinies, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    tokens = prompt(LENGTH)
    ours = Rig(tinies.path(name), chunk=40, dtype=dtype).logits(tokens, (40, 1))
    assert_close(ours, tinies.logits(name, tokens), tolerance)


def test_step_seq_gives_the_logits_after_a_chunk(tinies: Tinies) -> None:
    rig, tokens = Rig(tinies.path("gemma2")), prompt(70)
    expected = tinies.logits("gemma2", tokens)
    tables = rig.sequence(len(tokens))
    with torch.inference_mode():
        for offset, count in ((0, 40), (40, 29), (69, 1)):
            logits = rig.program.step_seq(tables, tokens, offset, count)
            assert_close(logits, expected[offset + count - 1])


def test_rows_that_pad_a_pass_write_to_the_null_block_only(tinies: Tinies) -> None:
    rig = Rig(tinies.path("mistral"), block_tokens=8)
    [table] = rig.sequence(3)
    before = {layer: keys.clone() for layer, keys in rig.pool.keys.items()}
    assert padded_rows(3) > 3
    rig.run([Chunk([5, 6, 7], 0, [table])])
    for layer, keys in rig.pool.keys.items():
        changed = (keys.isnan() != before[layer].isnan()).flatten(2).any(-1)
        assert changed.nonzero().tolist() == [
            *([table[0], at] for at in range(3)),
            [rig.pool.null_block(0), 0],
        ]


def test_a_row_s_bits_do_not_depend_on_what_runs_beside_it(tinies: Tinies) -> None:
    if "Math Kernel Library" not in torch.__config__.show():
        pytest.skip("known of MKL only")
    rig, tokens = Rig(tinies.path("gemma3")), prompt(100)
    others = [Chunk(prompt(21, 5), 0, rig.sequence(21)), Chunk(prompt(9, 6), 0, rig.sequence(9))]
    alone = rig.logits(tokens, (100,))
    tables = rig.sequence(100)
    rig.run([others[0], Chunk(tokens[:99], 0, tables)])
    beside = rig.run([others[1], Chunk(tokens[99:], 99, tables), others[0]])
    assert torch.equal(beside[9], alone[99])


def test_a_pass_of_too_many_rows_or_none_is_refused(tinies: Tinies) -> None:
    rig = Rig(tinies.path("llama"), chunk=8)
    for size in (0, 9):
        with pytest.raises(ValueError, match=rf"a pass of {size} rows; room is for 1 to 8"):
            rig.run([Chunk([1] * size, 0, rig.sequence(9))])


def test_a_pass_can_be_interrupted_before_every_layer(tinies: Tinies) -> None:
    asked = iter([False, False, True])
    rig = Rig(tinies.path("llama"), should_stop=lambda: next(asked))
    with pytest.raises(StepInterrupted, match="before layer 2"):
        rig.run([Chunk([1, 2], 0, rig.sequence(2))])


# Kernels


COLUMNS, OUTPUTS = 512, 48


@pytest.fixture(params=FORMATS.values(), ids=lambda layout: layout.name)
def packed(request: pytest.FixtureRequest) -> tuple[PackedWeight, Tensor]:
    """A random weight of each format, and its values as float64."""
    layout: Format = request.param
    raw = gguf_bytes.random_blocks(layout, OUTPUTS, COLUMNS, np.random.default_rng(7))
    values = dequantize(raw.copy(), GGMLQuantizationType(layout.type_id)).reshape(OUTPUTS, COLUMNS)
    weight = PackedWeight("w", layout, torch.from_numpy(raw.copy()), OUTPUTS, COLUMNS)
    return weight, torch.from_numpy(np.array(values, dtype=np.float64))


@pytest.mark.parametrize("slab_rows", [1, 5, OUTPUTS])
def test_products_with_every_packed_format(
    packed: tuple[PackedWeight, Tensor], slab_rows: int
) -> None:
    weight, values = packed
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(1))
    run = KernelTable().choose("linear", device="cpu", format=weight.format.name)
    out = torch.full((4, OUTPUTS + 3), 7.0)
    run(x, weight, torch.empty(slab_rows * COLUMNS), out[:, 1 : OUTPUTS + 1])
    assert_close(out[:, 1 : OUTPUTS + 1].double(), x.double() @ values.T, 1e-5)
    assert (out[:, 0] == 7).all() and (out[:, OUTPUTS + 1 :] == 7).all()


def test_embeddings_of_every_packed_format(packed: tuple[PackedWeight, Tensor]) -> None:
    weight, values = packed
    tokens = torch.tensor([0, OUTPUTS - 1, 3, 3])
    run = KernelTable().choose("embedding", device="cpu", format=weight.format.name)
    out = torch.empty(4, COLUMNS)
    run(tokens, weight, 3.0, torch.empty(4, weight.data.shape[1], dtype=torch.uint8), out)
    assert_close(out.double(), 3 * values[tokens], 1e-6)


def test_refused_kernels_are_recorded() -> None:
    def fast(*_: object) -> None: ...

    def refuses(*, columns: int) -> str | None:
        return "columns are odd" if columns % 2 else None

    table = KernelTable([Kernel("linear", "fast", fast, refuses=refuses), *_reference_rows()])
    assert table.choose("linear", device="cpu", format="Q4_0", columns=2) is fast
    floor = table.choose("linear", device="cpu", format="Q4_0", columns=3)
    assert floor is not fast
    assert table.refusals == {("linear", "Q4_0", "cpu", "fast"): "columns are odd"}
    with pytest.raises(LookupError, match="no kernel for convolution"):
        table.choose("convolution", device="cpu")


def _reference_rows() -> tuple[Kernel, ...]:
    from asyncllm.kernels.ops import REFERENCE_ROWS

    return REFERENCE_ROWS


# Checkpoints made by hand: one small llama whose parts can be changed.


HEAD, WIDTH, INNER, VOCAB = 16, 64, 96, 40
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.block_count": 1,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (VOCAB, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (4 * HEAD, WIDTH),
    "blk.0.attn_k.weight": (2 * HEAD, WIDTH),
    "blk.0.attn_v.weight": (2 * HEAD, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, 4 * HEAD),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.ffn_gate.weight": (INNER, WIDTH),
    "blk.0.ffn_up.weight": (INNER, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, INNER),
}
Make = Callable[..., Checkpoint]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens the small llama with some metadata and shapes changed, or left out where `None`."""
    opened: list[Checkpoint] = []

    def made(
        metadata: dict[str, Any] | None = None,
        shapes: dict[str, tuple[int, ...] | None] | None = None,
        layout: str = "F32",
    ) -> Checkpoint:
        entries = METADATA | (metadata or {})
        rng, tensors = np.random.default_rng(0), {}
        for name, shape in (SHAPES | (shapes or {})).items():
            if shape is not None:
                kind = layout if len(shape) == 2 else "F32"
                count = int(np.prod(shape[:-1]))
                raw = gguf_bytes.random_blocks(gguf_bytes.BY_NAME[kind], count, shape[-1], rng, 0.1)
                tensors[name] = (kind, shape, raw.tobytes())
        path = tmp_path / f"{len(opened)}.gguf"
        entries = {key: value for key, value in entries.items() if value is not None}
        path.write_bytes(gguf_bytes.gguf(entries, tensors))
        opened.append(open_checkpoint(path))
        return opened[-1]

    yield made
    for checkpoint in opened:
        checkpoint.close()


def bind(checkpoint: Checkpoint, **more: Any) -> CausalLM:
    return CausalLM.bind(checkpoint, ModelConfig.from_checkpoint(checkpoint), **more)


def test_a_sound_checkpoint_binds_and_every_tensor_is_reported_once(make: Make) -> None:
    seen: list[str] = []
    model = bind(make(), on_tensor=lambda info: seen.append(info.name))
    assert sorted(seen) == sorted(SHAPES)
    assert model.head.weight is model.embedding


def test_binding_ends_with_what_on_tensor_raises(make: Make) -> None:
    def stop(info: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bind(make(), on_tensor=stop)


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(make: Make, name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"tensor '{name}' is missing"):
        bind(make(shapes={name: None}))


@pytest.mark.parametrize("name", set(SHAPES) - {"token_embd.weight"})
def test_a_tensor_of_another_shape_is_named_with_both_shapes(make: Make, name: str) -> None:
    shape = SHAPES[name]
    wrong = (*shape[:-1], shape[-1] + 4)
    with pytest.raises(CorruptCheckpointError) as caught:
        bind(make(shapes={name: wrong}))
    message = str(caught.value)
    assert name in message and str(list(shape)) in message and str(list(wrong)) in message
    assert "byte" in message


def test_a_flat_tensor_is_no_matrix(make: Make) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"attn_q\.weight' has shape \[4096\]"):
        bind(make(shapes={"blk.0.attn_q.weight": (4 * HEAD * WIDTH,)}))


def test_tensors_nobody_uses_are_named_the_first_of_many(make: Make) -> None:
    extra: dict[str, tuple[int, ...] | None] = {f"blk.{i}.attn_norm.weight": (4,) for i in (1, 2)}
    with pytest.raises(
        CorruptCheckpointError,
        match=r"'llama' has no use for tensors blk\.1\.attn_norm\.weight, blk\.2\.attn_norm",
    ):
        bind(make(shapes=extra))
    many: dict[str, tuple[int, ...] | None] = {f"extra.{i}": (4,) for i in range(20)}
    with pytest.raises(CorruptCheckpointError, match="and 12 more"):
        bind(make(shapes=many))


def test_a_bias_that_the_family_has_not_is_an_unused_tensor(make: Make) -> None:
    assert (
        bind(make(shapes={"blk.0.attn_q.bias": (4 * HEAD,)}))
        .layers[0]
        .attention.projections[0]
        .bias
        is not None
    )
    with pytest.raises(CorruptCheckpointError, match=r"ffn_up\.bias"):
        bind(make(shapes={"blk.0.ffn_up.bias": (INNER,)}))


def test_an_unknown_architecture_is_named_with_those_that_are_known(make: Make) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_checkpoint(make({"general.architecture": "mamba"}))
    message = str(caught.value)
    assert "'mamba'" in message
    assert "gemma2, gemma3, llama, phi3, qwen2, qwen3" in message


def test_mixtures_of_experts_are_refused(make: Make) -> None:
    with pytest.raises(UnsupportedModelError, match=r"llama\.expert_count is 8"):
        ModelConfig.from_checkpoint(make({"llama.expert_count": 8}))
    assert ModelConfig.from_checkpoint(make({"llama.expert_count": 0})).heads == 4


@pytest.mark.parametrize(
    "name",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(make: Make, name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=rf"'llama\.{name}' is missing"):
        ModelConfig.from_checkpoint(make({f"llama.{name}": None}))


TYPED = gguf_bytes.Typed


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention.head_count", 0, "a whole number from 1"),
        ("attention.head_count", 3, "multiple of the 2 key and value heads"),
        ("attention.head_count", "four", "int is expected"),
        ("attention.head_count", 4.0, "int is expected"),
        ("attention.head_count", True, "int is expected"),
        ("attention.head_count", TYPED("int32", -4), "a whole number from 1"),
        ("attention.head_count", TYPED("int32", [4]), "int is expected"),
        ("attention.head_count_kv", 0, "a whole number from 1"),
        ("block_count", 0, "a whole number from 1"),
        ("block_count", 1 << 20, "a whole number from 1 to 65536"),
        ("embedding_length", 0, "a whole number from 1"),
        ("embedding_length", 66, "multiple of the 4 heads"),
        ("embedding_length", 3, "multiple of the 4 heads"),
        ("feed_forward_length", 0, "a whole number from 1"),
        ("context_length", 0, "a whole number from 1"),
        ("context_length", TYPED("uint64", 1 << 60), "a whole number from 1"),
        ("attention.key_length", 0, "a whole number from 1"),
        ("attention.layer_norm_rms_epsilon", 0.0, "above 0"),
        ("attention.layer_norm_rms_epsilon", -1e-5, "above 0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "above 0"),
        ("attention.layer_norm_rms_epsilon", "small", "float is expected"),
        ("rope.dimension_count", 0, "a whole number from 1"),
        ("rope.dimension_count", 7, "an even number up to the head's width 16"),
        ("rope.dimension_count", 18, "an even number up to the head's width 16"),
        ("rope.freq_base", 0.0, "above 0"),
        ("rope.freq_base", float("inf"), "up to 1e"),
        ("rope.scaling.factor", 0.0, "above 0"),
        ("rope.scaling.type", 2, "str is expected"),
        ("rope.scaling.original_context_length", 0, "a whole number from 1"),
        ("attention.sliding_window", "all", "int is expected"),
        ("attention.sliding_window", TYPED("int32", -1), "a whole number from 0"),
        ("attn_logit_softcapping", -1.0, "from 0"),
        ("final_logit_softcapping", float("nan"), "from 0"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(
    make: Make, name: str, value: object, expected: str
) -> None:
    with pytest.raises(CorruptCheckpointError, match=expected) as caught:
        ModelConfig.from_checkpoint(make({f"llama.{name}": value}))
    assert f"llama.{name}" in str(caught.value)


def test_layer_patterns_are_checked(make: Make) -> None:
    windowed = {"llama.attention.sliding_window": 8}
    pattern = "llama.attention.sliding_window_pattern"
    flags = TYPED("bool", [True, False])
    config = ModelConfig.from_checkpoint(make({**windowed, "llama.block_count": 2, pattern: flags}))
    assert [layer.window for layer in config.layers] == [8, None]
    config = ModelConfig.from_checkpoint(make({**windowed, "llama.block_count": 4, pattern: 2}))
    assert [layer.window for layer in config.layers] == [8, None, 8, None]
    for bad in (flags, "even", 1.5):
        with pytest.raises(CorruptCheckpointError, match=pattern):
            ModelConfig.from_checkpoint(make({**windowed, pattern: bad}))


def test_what_is_sound_but_unknown_is_unsupported(make: Make) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.type 'spiral'.*longrope"):
        ModelConfig.from_checkpoint(make({"llama.rope.scaling.type": "spiral"}))
    with pytest.raises(UnsupportedModelError, match="16 in keys and 8 in values"):
        ModelConfig.from_checkpoint(make({"llama.attention.value_length": 8}))


def test_widened_weights_are_bf16_copies_of_what_is_packed_tighter(make: Make) -> None:
    packed, wide = bind(make(layout="Q4_0")), bind(make(layout="Q4_0"), widen_weights=True)
    for before, after in (
        (packed.embedding, wide.embedding),
        (packed.layers[0].feed_forward.down.weight, wide.layers[0].feed_forward.down.weight),
    ):
        assert (before.format.name, after.format.name) == ("Q4_0", "BF16")
        values = [torch.empty(w.rows, w.columns) for w in (before, after)]
        before.format.unpack(before.data, values[0])
        after.format.unpack(after.data, values[1])
        assert torch.equal(values[0].bfloat16().float(), values[1])
    exact = bind(make(), widen_weights=True)
    assert exact.embedding.format.name == "F32"


def test_widened_weights_give_nearly_the_same_logits(make: Make) -> None:
    found = []
    for widen in (False, True):
        rig = Rig(make(layout="Q8_0").path, context_length=128, widen_weights=widen)
        found.append(rig.logits([i % VOCAB for i in range(50)], (50,)))
    assert_close(found[1], found[0], 0.1)


def test_large_matrices_stay_in_the_mapped_file(make: Make) -> None:
    checkpoint = make(layout="Q4_0")
    start = checkpoint.tensors["token_embd.weight"].data.__array_interface__["data"][0]
    assert bind(checkpoint).embedding.data.data_ptr() == start


# Memory


def stretched(layers: int, context: int) -> Tiny:
    changes = {"num_hidden_layers": layers, "max_position_embeddings": context}
    return Tiny("Llama", TINY_MODELS["llama"].arch, changes)


def test_the_memory_of_a_prefill_is_one_layer_s_whatever_the_depth(tmp_path: Path) -> None:
    peaks, buffers = [], []
    for layers in (2, 20):
        tiny = stretched(layers, CONTEXT)
        path = write_gguf(build(tiny), tiny, tmp_path / f"{layers}.gguf")
        rig = Rig(path, chunk=128)
        tables = rig.sequence(CONTEXT)
        for offset in (0, 128):  # the first is warm-up
            chunk = Chunk(prompt(128), offset, tables)
            peak = allocated_bytes(lambda chunk=chunk, rig=rig: _forward(rig, chunk))[1]  # type: ignore[misc]
        peaks.append(peak)
        buffers.append(rig.program.workspace.nbytes)
    assert buffers[0] == buffers[1]
    assert peaks[0] == peaks[1]
    # Less than the activations of one layer for one chunk, which are in the buffers.
    assert peaks[0] < 128 * (64 + 96 * 2) * 4


def _forward(rig: Rig, chunk: Chunk) -> None:
    with torch.inference_mode():
        rig.program.forward([chunk])


def test_a_decode_step_allocates_the_same_early_and_late(tmp_path: Path) -> None:
    tiny = stretched(3, 1024)
    rig = Rig(write_gguf(build(tiny), tiny, tmp_path / "long.gguf"), context_length=1024, chunk=64)
    tokens, tables = prompt(1000), rig.sequence(1000)

    def decode(position: int) -> int:
        chunk = Chunk(tokens[position : position + 1], position, tables)
        return allocated_bytes(lambda: rig.run([chunk]))[0]

    sums = {}
    offset = 0
    for position in (50, 900):
        while offset < position:
            size = min(64, position - offset)
            rig.run([Chunk(tokens[offset : offset + size], offset, tables)])
            offset += size
        decode(position)
        sums[position] = {decode(position) for _ in range(3)}
    ids = 8 * (-(-901 // 8) + -(-51 // 8))  # the numbers of the blocks themselves
    assert len(sums[50]) == len(sums[900]) == 1
    assert abs(sums[900].pop() - sums[50].pop()) <= ids
