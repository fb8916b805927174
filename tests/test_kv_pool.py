"""The memory of the K/V pool: what is granted, what is taken, what a machine allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncllm.errors import OptionsError
from asyncllm.kv import pool as pool_module
from asyncllm.kv.blocks import KvCache
from asyncllm.kv.pool import RESERVE_BYTES, KvPool, available_bytes, layer_groups, ring_blocks
from asyncllm.model.architectures import find_architecture
from asyncllm.model.config import LayerConfig, ModelConfig
from asyncllm.model.rope import RopeConfig
from asyncllm.scheduler.step import LayerGroup

GIB = 1 << 30
BLOCK = 16 * 2 * 2 * 8 * 4  # tokens, K and V, heads, width, float32: of one layer


def groups(*capacities: int) -> list[LayerGroup]:
    """The first group has layers 0 and 2, the second layer 1 under a window."""
    layers = [LayerGroup(None, (0, 2), 2 * BLOCK), LayerGroup(32, (1,), BLOCK)]
    return [replace(g, capacity=c) for g, c in zip(layers, capacities, strict=True)]


def pool(*capacities: int, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(groups(*capacities), block_tokens=16, kv_heads=2, head_dim=8, dtype=dtype)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_every_layer_has_zeros_for_all_blocks_and_the_null_block() -> None:
    made = pool(10, 4)
    assert set(made.keys) == set(made.values) == {0, 1, 2}
    assert made.keys[0].shape == made.values[2].shape == (11, 16, 2, 8)
    assert made.keys[1].shape == (5, 16, 2, 8)
    assert not any(buffer.any() for buffer in (*made.keys.values(), *made.values.values()))
    assert (made.null_block(0), made.null_block(1)) == (10, 4)


def test_it_starts_with_nothing_and_grants_up_to_the_capacity() -> None:
    made = pool(10, 4)
    assert (made.granted, made.growths, made.pool_bytes) == ([0, 0], 0, 0)
    assert made.grow(0, 6) == 6
    assert made.grow(1, 3) == 3
    assert made.pool_bytes == 6 * 2 * BLOCK + 3 * BLOCK
    assert made.grow(0, 6) == 4
    assert made.grow(0, 1) == 0
    assert made.grow(1, 0) == 0
    assert (made.granted, made.growths) == ([10, 3], 3)


def test_no_more_is_granted_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(10, 4)
    free = RESERVE_BYTES + 5 * 2 * BLOCK - 1
    monkeypatch.setattr(pool_module, "available_bytes", lambda: free)
    assert made.grow(0, 8) == 4
    monkeypatch.setattr(pool_module, "available_bytes", lambda: RESERVE_BYTES - 1)
    assert made.grow(0, 8) == 0
    assert made.growths == 1


def test_growing_moves_nothing() -> None:
    made = pool(10, 4)
    made.grow(0, 1)
    place = made.keys[0].data_ptr()
    made.keys[0][0].fill_(3.0)
    made.grow(0, 9)
    assert made.keys[0].data_ptr() == place
    assert (made.keys[0][0] == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_is_of_all_layers_of_the_group_and_of_no_other(dtype: torch.dtype) -> None:
    made = pool(4, 4, dtype=dtype)
    for layer in range(3):
        made.keys[layer][1] = 10 + layer
        made.values[layer][1] = 20 + layer
    made.copy(0, 1, 3)
    for layer in (0, 2):
        assert (made.keys[layer][3] == 10 + layer).all()
        assert (made.values[layer][3] == 20 + layer).all()
        assert not made.keys[layer][[0, 2, 4]].any()
    assert not made.keys[1][3].any()


def test_int8_has_a_scale_for_each_head_of_each_token_and_copies_it() -> None:
    made = pool(4, 4, dtype=torch.int8)
    assert set(made.scales) == {0, 1, 2}
    for layer in range(3):
        for number, scales in enumerate(made.scales[layer]):
            assert (scales.shape, scales.dtype) == ((5, 2, 16), torch.float32)
            assert not scales.any()
            scales[1] = 10 * number + layer + 1
        made.keys[layer][1] = layer + 1
    made.copy(0, 1, 3)
    for layer in (0, 2):
        assert (made.keys[layer][3] == layer + 1).all()
        assert [set(s[3].flatten().tolist()) for s in made.scales[layer]] == [
            {layer + 1.0},
            {layer + 11.0},
        ]
        assert not any(s[[0, 2, 4]].any() for s in made.scales[layer])
    assert not any(s[3].any() for s in made.scales[1])
    made.close()
    assert not made.scales
    assert not pool(4, 4).scales


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_only_what_is_written_takes_memory() -> None:
    group = LayerGroup(None, (0,), 2 * (1 << 20), 16384)  # 32 GiB of blocks of 1 MiB, K and V
    before = resident_bytes()
    made = KvPool([group], block_tokens=16, kv_heads=32, head_dim=512, dtype=torch.float32)
    assert made.keys[0].nbytes + made.values[0].nbytes > 32 * GIB
    made.grow(0, 1000)
    assert resident_bytes() - before < 4 << 20
    made.keys[0][100:116].fill_(1.0)
    assert 15 << 20 < resident_bytes() - before < 24 << 20
    made.close()
    made.close()
    assert resident_bytes() - before < 4 << 20


# Layer groups


def config(*windows: int | None) -> ModelConfig:
    rope = RopeConfig(rotary_dim=8, base=10000.0)
    return ModelConfig(
        architecture=find_architecture("gemma3"),
        layers=tuple(LayerConfig(window, rope) for window in windows),
        embedding=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        feed_forward=64,
        vocab_size=100,
        context_length=1000,
        norm_eps=1e-6,
        query_scale=1.0,
        attention_softcap=0.0,
        final_softcap=0.0,
        embedding_scale=1.0,
    )


def grouped(
    *windows: int | None, kv_bytes: int = 1 << 40, dtype: torch.dtype = torch.float32
) -> tuple[LayerGroup, ...]:
    return layer_groups(
        config(*windows),
        block_tokens=16,
        chunk=64,
        max_seqs=4,
        context_length=1000,
        kv_bytes=kv_bytes,
        dtype=dtype,
    )


def test_unwindowed_layers_are_one_group_and_each_window_size_is_one() -> None:
    full, small, large = grouped(32, None, 64, 32, None)
    assert (full.window, full.layers) == (None, (1, 4))
    assert (small.window, small.layers) == (32, (0, 3))
    assert (large.window, large.layers) == (64, (2,))
    assert (full.block_bytes, large.block_bytes) == (2 * BLOCK, BLOCK)
    assert grouped(None, dtype=torch.bfloat16)[0].block_bytes == BLOCK // 2
    scales = 16 * 2 * 2 * 4  # of a token, of K and V, of a head
    assert grouped(None, dtype=torch.int8)[0].block_bytes == BLOCK // 4 + scales


def test_in_full_the_pool_holds_all_sequences_and_twice_their_rings() -> None:
    full, windowed = grouped(None, 32)
    assert full.capacity == 4 * 63
    assert windowed.capacity == 4 * 2 * ring_blocks(32, 64, 16) == 4 * 2 * 7
    # A window longer than the context needs no more than the context.
    assert grouped(100_000)[0].capacity == 4 * 2 * 63


@pytest.mark.parametrize("window", [1, 16, 17, 31, 500])
@pytest.mark.parametrize("chunk", [1, 16, 33, 512])
def test_rings_are_as_large_as_the_accounts_have_them(window: int, chunk: int) -> None:
    cache = KvCache(
        [LayerGroup(window, (0,), 1, 1)],
        block_tokens=16,
        max_chunk=chunk,
        grow=lambda group, blocks: blocks,
        fingerprint=b"",
        prefix_cache=False,
    )
    assert cache.rings == (ring_blocks(window, chunk, 16),)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_a_smaller_budget_is_shared_out_and_kept(share: float) -> None:
    wanted = 4 * 63 * BLOCK + 56 * 2 * BLOCK
    least = 2 * BLOCK + 7 * 2 * BLOCK
    budget = int(least + share * (wanted - least))
    full, windowed = grouped(None, 32, 32, kv_bytes=budget)
    used = full.capacity * full.block_bytes + windowed.capacity * windowed.block_bytes
    assert budget - full.block_bytes - windowed.block_bytes < used <= budget
    assert full.capacity >= 2
    assert windowed.capacity >= 7


def test_a_budget_for_less_than_one_short_sequence_is_refused_with_the_numbers() -> None:
    least = 2 * BLOCK + 7 * 2 * BLOCK
    with pytest.raises(OptionsError) as caught:
        grouped(None, 32, 32, kv_bytes=least - 1)
    message = str(caught.value)
    for part in (
        f"kv_bytes={least - 1}",
        f"needs {least} bytes",
        f"2 blocks of {BLOCK} bytes for 1 layers of no window",
        f"7 blocks of {2 * BLOCK} bytes for 2 layers of window 32",
        "max_seqs=4 of context_length=1000",
    ):
        assert part in message


def test_auto_takes_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto() -> int:
        (group,) = layer_groups(
            config(None),
            block_tokens=16,
            chunk=64,
            max_seqs=4,
            context_length=1000,
            kv_bytes="auto",
            dtype=torch.float32,
        )
        return group.capacity

    free = RESERVE_BYTES + 100 * BLOCK
    monkeypatch.setattr(pool_module, "available_bytes", lambda: free)
    assert auto() == 50
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 10 * GIB)
    assert auto() == 4 * 63
    monkeypatch.setattr(pool_module, "available_bytes", lambda: RESERVE_BYTES // 2)
    with pytest.raises(OptionsError, match=rf"gives 0 bytes \({RESERVE_BYTES // 2} are free\)"):
        auto()


# What the machine has


def machine(root: Path, free_kib: int, files: dict[str, str]) -> Path:
    made = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {free_kib} kB\n"} | files
    for name, text in made.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_system_s_own_figure_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 4096, {})) == 4 << 20


def test_without_any_figure_there_is_still_an_answer(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0


def test_the_tightest_of_the_control_groups_on_the_way_up_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/user/app\n",
        f"{base}/memory.stat": "anon 5\n",
        f"{base}/user/memory.max": f"{3 * GIB}\n",
        f"{base}/user/memory.current": f"{GIB}\n",
        f"{base}/user/memory.stat": f"anon 9\ninactive_file {GIB // 2}\nactive_file 7\n",
        f"{base}/user/app/memory.max": "max\n",
        f"{base}/user/app/memory.current": f"{GIB}\n",
    }
    root = machine(tmp_path, 16 << 20, files)
    assert available_bytes(root) == 2 * GIB + GIB // 2
    (root / base / "user/app/memory.max").write_text(f"{GIB + 4096}\n")
    assert available_bytes(root) == 4096
    (root / base / "user/app/memory.max").write_text("4096\n")  # lowered below what is used
    assert available_bytes(root) == 0


def test_inside_a_container_the_root_s_own_limit_counts(tmp_path: Path) -> None:
    # The path may name a place that is not mounted here; the mount's root still has the limit.
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    root = machine(tmp_path, 16 << 20, files)
    assert available_bytes(root) == GIB
    (root / "proc/self/cgroup").write_text("0::/../../elsewhere/gone\n")
    assert available_bytes(root) == GIB


def test_version_1_of_control_groups_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/box\n0::/x\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/memory.usage_in_bytes": "1\n",
        f"{base}/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{base}/box/memory.usage_in_bytes": f"{GIB}\n",
        f"{base}/box/memory.stat": f"inactive_file 5\ntotal_inactive_file {1 << 20}\n",
    }
    assert available_bytes(machine(tmp_path, 16 << 20, files)) == GIB + (1 << 20)


@pytest.mark.parametrize("line", ["nonsense", "1:2", "", "0::"])
def test_a_line_that_says_nothing_is_passed_over(tmp_path: Path, line: str) -> None:
    root = machine(tmp_path, 4096, {"proc/self/cgroup": line + "\n"})
    assert available_bytes(root) == 4 << 20
