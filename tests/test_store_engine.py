"""Whole engines with a block store: the tokens of one without, whatever happens to the file."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, Completion, EngineClosedError, OptionsError, StoreError
from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.engine import EngineLoading
from asyncllm.kv import store_file
from asyncllm.kv.pool import KvPool
from asyncllm.model.config import ModelConfig
from asyncllm.model.identity import fingerprint
from asyncllm.scheduler.step import BlockTransfer, LayerGroup, StepPlan
from tests.cpu_kernels import directory
from tests.fake_engine import until
from tests.store_disks import FaultyDisk, spoil, written
from tests.tiny_models import TINY_MODELS, VOCABULARY, Tiny, build, write_gguf

TINY = ("llama", "mistral-wide", "gemma3")  # no window, all windows, both
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny models by name, seed of the weights and further metadata."""
    made = tmp_path_factory.mktemp("tiny")

    @cache
    def path(name: str, seed: int = 0, metadata: tuple[tuple[str, Any], ...] = ()) -> Path:
        shape = TINY_MODELS[name]
        shape = Tiny(shape.family, shape.arch, shape.changes, dict(metadata))
        file = made / f"{name}-{seed}-{len(metadata)}.gguf"
        return write_gguf(build(shape, seed), shape, file, tokenizer=True)

    return path


def load(model: Path, store: Path | None = None, **more: Any) -> EngineLoading:
    options: dict[str, Any] = {
        "threads": 1,
        "block_tokens": BLOCK_TOKENS,
        "chunk": 64,
        "max_seqs": 4,
        "context_length": 256,
        "tune_dir": directory(),
        "kv_store": store,
        "kv_store_bytes": 16 << 20,
    }
    return AsyncEngine.load(model, **(options | more))


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts that share beginnings of several lengths."""
    rng = random.Random(5)
    stems = [rng.choices(range(3, VOCABULARY), k=length) for length in (150, 90, 40)]
    return [stems[i % 3] + rng.choices(range(3, VOCABULARY), k=i % 7 + 1) for i in range(count)]


async def answers(engine: AsyncEngine, **more: Any) -> list[Completion]:
    options = {"max_tokens": 10, "temperature": 0, "ignore_eos": True} | more
    generations = [engine.generate(prompt, **options) for prompt in prompts()]
    return [await generation for generation in generations]


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in done]


def cached(done: list[Completion]) -> int:
    return sum(each.usage.cached_tokens for each in done)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("more", [{}, {"block_tokens": 8}], ids=["compiled", "plain"])
async def test_tokens_are_those_of_an_engine_without_a_store(
    tiny: Callable[..., Path], tmp_path: Path, name: str, more: Mapping[str, Any]
) -> None:
    model, store = tiny(name), tmp_path / "blocks"
    async with load(model, prefix_cache=False, **more) as engine:
        expected = tokens(await answers(engine))
        seeded = tokens(await answers(engine, temperature=1.0, seed=3))
        assert engine.info.backend.startswith("plain") == ("block_tokens" in more)
    async with load(model, store, **more) as engine:
        assert tokens(await answers(engine)) == expected, "cold"
        assert tokens(await answers(engine)) == expected, "warm"
        await written(engine)
        stats = engine.stats()
        assert stats.store_written_blocks > 20
        assert stats.store_faults == stats.store_rejected_blocks == 0
    async with load(model, store, **more) as engine:
        found = await answers(engine)
        assert tokens(found) == expected, "after a restart"
        assert tokens(await answers(engine, temperature=1.0, seed=3)) == seeded
        assert cached(found) > 0.8 * sum(map(len, prompts()))
        assert engine.stats().store_hit_blocks >= 6, "of all windows only the last blocks"
    spoil(store, 0.5)
    async with load(model, store, **more) as engine:
        assert tokens(await answers(engine)) == expected, "over a damaged file"
    async with load(model, store, **more) as engine:
        found = await answers(engine)
        assert tokens(found) == expected, "and what was made good of it"
        # Damage to what nobody had to read, as blocks before a window, shows only now.
        assert cached(found) > 0.5 * sum(map(len, prompts()))


async def test_after_a_restart_only_the_tail_is_computed(
    tiny: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, store = prompts()[0][:130], tmp_path / "blocks"
    rows = []
    for _ in range(2):
        async with load(tiny("llama"), store) as engine:
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger="asyncllm"):
                done = await engine.generate(prompt, max_tokens=1, temperature=0)
            steps = [r for r in caplog.records if r.__dict__.get("event") == "sched-phase"]
            rows.append(sum(record.__dict__["fields"]["prompt_tokens"] for record in steps))
    assert rows == [130, 2]
    assert done.usage.cached_tokens == 128
    hits = [r.__dict__["fields"] for r in caplog.records if r.__dict__["event"] == "prefix-hit"]
    assert hits == [{"tokens": 128, "stored_blocks": 8, "shortened": ""}]


async def test_salts_and_requests_without_the_cache_share_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    prompt, store = prompts()[0], tmp_path / "blocks"
    async with load(tiny("gemma3"), store) as engine:
        await engine.generate(prompt, max_tokens=2, cache_salt="a tenant")
        hidden = prompts()[1]
        await engine.generate(hidden, max_tokens=2, prefix_cache=False)
    async with load(tiny("gemma3"), store) as engine:
        for more, hit in (
            ({}, False),
            ({"cache_salt": "another"}, False),
            ({"cache_salt": "a tenant", "prefix_cache": False}, False),
            ({"cache_salt": "a tenant"}, True),
        ):
            done = await engine.generate(prompt, max_tokens=2, **more)
            assert (done.usage.cached_tokens > 0) == hit, more
        assert (await engine.generate(hidden, max_tokens=2)).usage.cached_tokens == 0


async def test_several_outputs_fork_what_was_adopted(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    prompt, store = prompts()[0], tmp_path / "blocks"
    found = []
    for path in (None, store, store):
        async with load(tiny("gemma3"), path) as engine:
            done = await engine.generate(prompt, max_tokens=30, temperature=1.0, seed=1, n=3)
            found.append([choice.token_ids for choice in done.choices])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3
    assert done.usage.cached_tokens > 0


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_stores_what_the_last_requests_leave_behind(
    tiny: Callable[..., Path], tmp_path: Path, drain: bool
) -> None:
    store, prompt = tmp_path / "blocks", prompts()[0]
    engine = await load(tiny("llama"), store)
    finished = engine.generate(prompt, max_tokens=1, temperature=0)
    await finished
    running = engine.generate(prompts()[1], max_tokens=100, temperature=0, ignore_eos=True)
    await until(lambda: engine.stats().decoding == 1)
    await engine.aclose(drain=drain)
    if not drain:
        with pytest.raises(EngineClosedError):
            await running
    async with load(tiny("llama"), store) as engine:
        for each in (prompt, prompts()[1]):
            done = await engine.generate(each, max_tokens=1, temperature=0)
            assert done.usage.cached_tokens == (len(each) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_preempted_request_adopts_what_it_stored(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    async with load(tiny("llama"), max_seqs=3) as engine:
        expected = tokens(await answers(engine, max_tokens=60))
        stats = engine.stats()
        block = stats.kv_pool_bytes // stats.kv_blocks_total
    async with load(tiny("llama"), tmp_path / "blocks", max_seqs=3, kv_bytes=18 * block) as engine:
        assert tokens(await answers(engine, max_tokens=60)) == expected
        assert engine.stats().preempted > 0
        assert engine.stats().store_hit_blocks > 0


class TestIdentity:
    async def test_another_models_store_is_refused_or_replaced(
        self, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        store = tmp_path / "blocks"
        async with load(tiny("llama"), store) as engine:
            await answers(engine)
        before = store.read_bytes()
        for more in ({"block_tokens": 32}, {"kv_dtype": "bfloat16"}, {"widen_weights": True}):
            with pytest.raises(StoreError, match="kv_store_reset=True"):
                await load(tiny("llama"), store, **more)
        with pytest.raises(StoreError, match="kv_store_reset=True"):
            await load(tiny("llama", seed=1), store)
        assert store.read_bytes() == before
        async with load(tiny("llama", seed=1), store, kv_store_reset=True) as engine:
            found = await answers(engine)
            assert found[0].usage.cached_tokens == 0
        async with load(tiny("llama", seed=1)) as engine:
            assert tokens(await answers(engine)) == tokens(found)

    def test_everything_that_gives_kv_its_meaning_is_in_the_fingerprint(
        self, tiny: Callable[..., Path]
    ) -> None:
        def of(path: Path, context_length: int = 256, **settings: Any) -> bytes:
            with open_checkpoint(path) as checkpoint:
                config = ModelConfig.from_checkpoint(checkpoint)
                return fingerprint(
                    checkpoint,
                    config,
                    context_length=context_length,
                    **({"block_tokens": 16, "kv_dtype": "float16"} | settings),
                )

        path = tiny("llama")
        base = of(path)
        assert len(base) == 16
        assert base == of(path) == of(path, context_length=100)
        long = tiny("phi3-longrope")
        shape = TINY_MODELS["llama"]
        wordless = write_gguf(build(shape), shape, path.with_name("wordless.gguf"))
        others = [
            of(path, kv_dtype="float32"),
            of(path, block_tokens=32),
            of(tiny("llama", seed=1)),
            of(tiny("llama-biases")),
            of(tiny("llama-linear")),
            of(tiny("llama", metadata=(("rope.freq_base", 5000.0),))),
            of(tiny("mistral-wide")),
            of(tiny("mistral-wide", metadata=(("attention.sliding_window", 32),))),
            of(wordless),
            of(long, context_length=64),
            of(long, context_length=65),
        ]
        assert len({base, *others}) == 1 + len(others)

    def test_one_changed_weight_of_a_small_tensor_is_another_model(
        self, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        found = set()
        data = bytearray(tiny("llama").read_bytes())
        for at in (None, len(data) - 40, len(data) // 2):
            changed = bytearray(data)
            if at is not None:
                changed[at] ^= 1
            path = tmp_path / "changed.gguf"
            path.write_bytes(changed)
            with open_checkpoint(path) as checkpoint:
                config = ModelConfig.from_checkpoint(checkpoint)
                found.add(fingerprint(checkpoint, config, context_length=256))
        assert len(found) == 3


class TestSharing:
    async def test_one_engine_writes_and_others_read(
        self, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        store = tmp_path / "blocks"
        async with load(tiny("llama"), store) as writer:
            expected = tokens(await answers(writer))
            await written(writer)
            with pytest.raises(StoreError, match=f"held by process {os.getpid()}"):
                await load(tiny("llama"), store)
            before = store.read_bytes()
            async with load(tiny("llama"), store, kv_store_mode="ro") as reader:
                found = await answers(reader)
                assert tokens(found) == expected
                assert cached(found) > 0
                assert reader.stats().store_hit_blocks > 0
                assert reader.stats().store_written_blocks == 0
            assert store.read_bytes() == before
        with pytest.raises(StoreError, match="No such file"):
            await load(tiny("llama"), tmp_path / "none", kv_store_mode="ro")

    async def test_a_store_needs_prefixes(self, tiny: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(OptionsError, match="kv_store"):
            await load(tiny("llama"), tmp_path / "blocks", prefix_cache=False)
        with pytest.raises(OptionsError, match="kv_store_bytes=10: one block takes"):
            await load(tiny("llama"), tmp_path / "blocks", kv_store_bytes=10)

    async def test_a_failed_load_lets_go_of_the_file(
        self, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("the warm-up went wrong")

        with monkeypatch.context() as patched:
            patched.setattr("asyncllm.loading._throwaway_steps", broken)
            with pytest.raises(RuntimeError, match="the warm-up went wrong"):
                await load(tiny("llama"), tmp_path / "blocks")
        async with load(tiny("llama"), tmp_path / "blocks") as engine:
            await answers(engine)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """The disk under every store of the test."""
    made = FaultyDisk()
    monkeypatch.setattr(store_file, "FileLayer", lambda: made)
    return made


class TestFaults:
    @pytest.mark.parametrize("operation", ["open", "read", "write", "resize", "lock"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    async def test_a_disk_that_fails_fails_no_request(
        self,
        tiny: Callable[..., Path],
        tmp_path: Path,
        disk: FaultyDisk,
        caplog: pytest.LogCaptureFixture,
        operation: str,
        number: int,
    ) -> None:
        store = tmp_path / "blocks"
        async with load(tiny("llama"), store) as engine:
            expected = tokens(await answers(engine))
        for spare in (0, 1, 5, 12):
            caplog.clear()
            disk.failing[operation], disk.spare = OSError(number, "the disk is ill"), spare
            async with load(tiny("llama"), store) as engine:
                assert tokens(await answers(engine)) == expected
                assert tokens(await answers(engine, max_tokens=11))[0][:10] == expected[0]
                await written(engine)
                faults = engine.stats().store_faults
            met = [r.__dict__["fields"]["what"] for r in caplog.records if "fields" in r.__dict__]
            met = [what for what in met if what != "verify"]  # what a failed write left behind
            assert (len(met) > 0) == (faults > 0)
            assert len(met) == len(set(met)), "one record for each kind"
            assert spare or operation == "resize" or faults
            disk.failing.clear()
        assert os.listdir(tmp_path) == ["blocks"]

    async def test_a_file_that_is_deleted_or_cut_under_it_fails_no_request(
        self, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        store = tmp_path / "blocks"
        async with load(tiny("gemma3"), store) as engine:
            expected = tokens(await answers(engine))
        harms: list[Callable[[], None]] = [
            lambda: os.truncate(store, 1 << 18),
            lambda: os.truncate(store, 0),
            store.unlink,
        ]
        for harm in harms:
            async with load(tiny("gemma3"), store) as engine:
                harm()
                assert tokens(await answers(engine)) == expected
                await written(engine)
                assert tokens(await answers(engine)) == expected

    async def test_a_disk_that_does_not_answer_stops_nobody(
        self,
        tiny: Callable[..., Path],
        tmp_path: Path,
        disk: FaultyDisk,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("asyncllm.scheduler.transfers.PATIENCE_S", 0.3)
        monkeypatch.setattr("asyncllm.kv.store.CLOSE_PATIENCE_S", 0.1)
        monkeypatch.setattr("asyncllm.engine_thread.SAVE_AT_END_S", 0.1)
        store = tmp_path / "blocks"
        async with load(tiny("llama"), store) as engine:
            expected = tokens(await answers(engine))
        async with load(tiny("llama"), store) as engine:
            disk.gate.clear()
            async with asyncio.timeout(20):
                found = await answers(engine)
            assert tokens(found) == expected
        disk.gate.set()

    async def test_adoption_can_be_cancelled(
        self, tiny: Callable[..., Path], tmp_path: Path, disk: FaultyDisk
    ) -> None:
        store = tmp_path / "blocks"
        async with load(tiny("llama"), store) as engine:
            expected = tokens(await answers(engine))
        async with load(tiny("llama"), store) as engine:
            disk.gate.clear()
            generation = engine.generate(prompts()[0], max_tokens=10, temperature=0)
            await until(lambda: engine.stats().running == 1)
            other = await engine.generate(
                prompts()[1][::-1], max_tokens=3, temperature=0, ignore_eos=True
            )
            assert len(other.token_ids) == 3, "nobody waits for the disk"
            await generation.cancel()
            assert engine.stats().kv_blocks_used == 0
            disk.gate.set()
            assert tokens(await answers(engine)) == expected


class TestStaging:
    """Blocks' bytes between pool and slots; on a GPU the same calls are queued on its stream."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
    def test_blocks_come_back_in_other_places(self, dtype: torch.dtype) -> None:
        width = 8 * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        layer = 2 * 16 * 2 * width
        groups = [LayerGroup(None, (0, 2), 2 * layer, 9), LayerGroup(32, (1,), layer, 5)]
        pool = KvPool(groups, block_tokens=16, kv_heads=2, head_dim=8, dtype=dtype)
        buffers = [*pool.keys.values(), *pool.values.values()]
        buffers += [scales for pair in pool.scales.values() for scales in pair]
        for buffer in buffers:
            buffer.copy_(torch.randint(-100, 100, buffer.shape))
        before = [buffer.clone() for buffer in buffers]
        staging = pool.stage(7)
        staging._carrier = staging._carrier[:2]  # so that they go in several parts
        moves = [(0, 3, 6), (1, 2, 0), (0, 8, 1), (0, 0, 2), (1, 4, 3)]
        pool.prepare(StepPlan((), saves=tuple(BlockTransfer(*move) for move in moves)))
        assert {len(slot) for slot in staging.slots} == {2 * layer}
        for buffer in buffers:
            buffer.zero_()
        back = {(0, 3): 1, (1, 2): 3, (0, 8): 8, (0, 0): 2, (1, 4): 0}
        loads = tuple(BlockTransfer(g, back[g, block], slot) for g, block, slot in moves)
        pool.prepare(StepPlan((), loads=loads))
        for buffer, old in zip(buffers, before, strict=True):
            group = 0 if len(buffer) == 10 else 1
            for (own, block), place in back.items():
                if own == group:
                    assert torch.equal(buffer[place], old[block])
            untouched = set(range(len(buffer))) - {p for (g, _), p in back.items() if g == group}
            assert not buffer[sorted(untouched)].any()
