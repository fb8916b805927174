"""The block store's file: what is written comes back as it was or not at all."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.cli import main
from asyncllm.errors import OptionsError, StoreError
from asyncllm.kv.prefix import Prefix
from asyncllm.kv.store import BlockStore
from asyncllm.kv.store_index import ExtentIndex
from asyncllm.kv.store_layout import (
    PAGE,
    VERSION,
    Header,
    Layout,
    NotAStore,
    Superblock,
    header_seed,
)
from tests.store_disks import (
    BLOCK_TOKENS,
    FINGERPRINT,
    FaultyDisk,
    Store,
    chain_of,
    content,
)

IDS = list(range(100, 200))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


class TestLayout:
    @given(
        st.integers(0, 1 << 22),
        st.integers(1, 64),
        st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    )
    def test_the_file_takes_all_it_may_and_not_a_byte_more(
        self, limit: int, tokens: int, sizes: list[int]
    ) -> None:
        layout = Layout.within(limit, tokens, sizes)
        assert layout.extents == 0 or layout.file_bytes <= limit
        larger = Layout(tokens, tuple(sizes), layout.extents + 1)
        # Extents begin at a page, of which the smaller layout may need one more.
        assert larger.file_bytes > limit - PAGE

    def test_no_two_parts_overlap(self) -> None:
        layout = Layout(16, (100, 333), 5)
        parts = [(0, 3 * PAGE), (layout.stamps_offset, layout.stamps_bytes)]
        for group, size in enumerate(layout.extent_bytes):
            for extent in range(5):
                parts.append((layout.header_offset(group, extent), layout.header_bytes))
                parts.append((layout.extent_offset(group, extent), size))
        parts.sort()
        for (start, size), (following, _) in pairwise(parts):
            assert start + size <= following
        assert sum(parts[-1]) == layout.file_bytes

    def test_a_superblock_comes_back_and_its_copy_serves_for_it(self) -> None:
        block = Superblock(FINGERPRINT, "Modèle", Layout(16, (100, 333), 5))
        page = block.pack()
        assert len(page) == PAGE
        assert Superblock.parse(page) == block
        broken = bytearray(page)
        broken[20] ^= 1
        with pytest.raises(NotAStore, match="damaged"):
            Superblock.parse(bytes(broken))
        assert Superblock.find(bytes(broken) + page) == block
        with pytest.raises(NotAStore, match="no superblock") as caught:
            Superblock.find(b"<html>".ljust(2 * PAGE))
        assert caught.value.foreign
        later = bytearray(page)
        later[8] = VERSION + 1
        with pytest.raises(NotAStore, match=f"version {VERSION + 1}"):
            Superblock.find(bytes(later) * 2)

    def test_a_header_is_believed_in_its_own_place_only(self) -> None:
        header = Header(b"k" * 16, b"p" * 16, b"tokens..", 100, 7)
        seed = header_seed(FINGERPRINT, 1, 3)
        data = header.pack(seed)
        assert Header.parse(data, seed) == header
        for other in (
            header_seed(FINGERPRINT, 1, 4),
            header_seed(FINGERPRINT, 0, 3),
            header_seed(b"another model...", 1, 3),
        ):
            assert Header.parse(data, other) is None
        for at in range(len(data)):
            broken = bytearray(data)
            broken[at] ^= 0x10
            assert Header.parse(bytes(broken), seed) is None


class TestBlocks:
    def test_they_come_back_as_they_were_in_the_next_process_too(self, path: Path) -> None:
        first, chain = Store(path, sizes=(64, 100)), chain_of(IDS)
        for group in (0, 1):
            first.save(chain, range(6), group)
        for _ in range(2):
            for group, size in enumerate(first.sizes):
                assert first.read(chain, 2, group) == content(group, 2, size)
            assert first.read(chain, 7) is None
            first.close()
            first = Store(path, sizes=(64, 100))
            assert first.store.blocks == 12
        first.close()

    def test_a_key_without_its_tokens_is_no_hit(self, path: Path) -> None:
        store, chain = Store(path), chain_of(IDS)
        store.save(chain, [0, 1])
        found = chain[1]
        assert found.parent is not None
        assert store.store.has(0, found)
        assert not store.store.has(0, Prefix(found.parent, b"other tokens....", found.key))
        assert not store.store.has(0, Prefix(chain[2], found.tokens, found.key))
        store.close()

    def test_salts_do_not_share(self, path: Path) -> None:
        store = Store(path)
        store.save(chain_of(IDS, b"one"), [0])
        assert store.read(chain_of(IDS, b"one"), 0) == content(0, 0, 64)
        assert store.read(chain_of(IDS, b"two"), 0) is None
        assert store.read(chain_of(IDS), 0) is None
        store.close()

    def test_the_coldest_go_first_and_that_survives_a_restart(self, path: Path) -> None:
        store, chain = Store(path, extents=4), chain_of(IDS)
        store.save(chain, range(4))
        for number in (1, 3, 0):
            store.store.touch(0, chain[number])
        store.close()
        store = Store(path, extents=4)
        for new, gone in ((4, 2), (5, 1), (6, 3), (7, 0)):
            store.save(chain, [new])
            assert not store.store.has(0, chain[gone])
            assert store.read(chain, new) == content(0, new, 64)
        assert store.store.blocks == 4
        store.close()

    def test_the_space_bound_holds_to_the_byte(self, path: Path) -> None:
        for limit in (20_000, 20_001, 33_333):
            store, chain = Store(path, limit=limit, reset=True), chain_of(range(4000))
            store.save(chain, range(300))
            assert path.stat().st_size <= limit
            assert store.store.blocks == Layout.within(limit, BLOCK_TOKENS, (64,)).extents
            store.close()
            assert path.stat().st_size <= limit
        with pytest.raises(OptionsError, match=r"kv_store_bytes=100: one block takes \d+ bytes"):
            Store(path, limit=100)

    def test_writing_is_bounded_by_half_the_slots(self, path: Path) -> None:
        disk = FaultyDisk()
        store, chain = Store(path, slots=8, layer=disk), chain_of(IDS)
        disk.gate.clear()
        taken = [store.store.begin_save(0, 0, chain[number]) for number in range(6)]
        assert [transfer is not None for transfer in taken] == [True] * 4 + [False] * 2
        for number, transfer in enumerate(taken[:4]):
            assert transfer is not None
            store.store.end_save(transfer, chain[number])
        assert not store.store.wants(0, chain[0]), "it is on its way"
        assert store.store.begin_save(0, 0, chain[5]) is None, "still all are taken"
        disk.gate.set()
        store.settle()
        assert store.store.written_blocks == 4
        assert store.store.begin_save(0, 0, chain[5]) is not None
        store.close()

    def test_several_read_at_once_and_the_file_is_closed_after_the_last(self, path: Path) -> None:
        disk, chain, others = FaultyDisk(), chain_of(IDS), set(threading.enumerate())
        store = Store(path, extents=25, slots=25, layer=disk, readers=3)
        store.save(chain, range(12))
        for number in range(12):
            assert store.store.begin_read(0, chain[number], number)
        reads = store.settle()
        assert {number for number, _ in reads} == set(range(12))
        for owner, slot in reads:
            assert isinstance(owner, int)
            assert slot is not None
            assert store.slots[slot] == content(0, owner, 64)
            store.store.free(slot)
        disk.gate.clear()
        for number in range(12):
            assert store.store.begin_read(0, chain[number], number)
        threads = set(threading.enumerate()) - others
        assert len(threads) == 3
        store.close()  # returns, although the disk says nothing
        assert disk.calls[-1] != "close"
        disk.gate.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert disk.calls.count("close") == 1
        assert disk.calls[-1] == "close"

    def test_a_torn_write_is_a_miss(self, path: Path) -> None:
        """New bytes under an old header, as a kill between the two leaves them."""
        store, chain = Store(path, extents=1), chain_of(IDS)
        store.save(chain, [0])
        store.close()
        layout = Layout(BLOCK_TOKENS, (64,), 1)
        with path.open("r+b") as file:
            file.seek(layout.extent_offset(0, 0))
            file.write(content(0, 1, 30))
        store = Store(path, extents=1)
        assert store.store.has(0, chain[0])
        assert store.read(chain, 0) is None
        assert store.store.rejected_blocks == 1
        assert not store.store.has(0, chain[0])
        store.save(chain, [1])
        assert store.read(chain, 1) == content(0, 1, 64), "its extent is free again"
        store.close()

    def test_a_rejected_block_stays_rejected_after_a_restart(self, path: Path) -> None:
        store, chain = Store(path), chain_of(IDS)
        store.save(chain, [0, 1])
        layout = Layout(BLOCK_TOKENS, (64,), 8)
        with path.open("r+b") as file:
            file.seek(layout.extent_offset(0, 0) + 5)
            file.write(b"!")
        assert store.read(chain, 0) is None
        store.close()
        store = Store(path)
        assert not store.store.has(0, chain[0])
        assert store.read(chain, 1) == content(0, 1, 64)
        store.close()

    def test_a_hundred_thousand_extents_open_in_a_second(self) -> None:
        layout = Layout(16, (1 << 19,), 100_000)
        keys = [number.to_bytes(16, "little") for number in range(100_000)]
        random.Random(0).shuffle(keys)
        table = b"".join(
            Header(key, b"p" * 16, b"t" * 64, 1 << 19, 7).pack(header_seed(FINGERPRINT, 0, extent))
            for extent, key in enumerate(keys)
        )
        stamps = bytes(8 * 100_000)
        seconds = []
        for _ in range(3):
            started = time.thread_time()
            index = ExtentIndex.from_file(layout, 0, table, stamps, FINGERPRINT)
            seconds.append(time.thread_time() - started)
        assert len(index) == 100_000
        assert min(seconds) < 1.0, seconds


class TestIdentity:
    def test_another_models_file_is_refused_and_left_alone(self, path: Path) -> None:
        store = Store(path)
        store.save(chain_of(IDS), [0])
        store.close()
        before = path.read_bytes()
        with pytest.raises(StoreError, match=r"made for 'tiny'.*kv_store_reset=True"):
            Store(path, fingerprint=b"another model...")
        assert path.read_bytes() == before
        other = Store(path, fingerprint=b"another model...", reset=True)
        assert other.store.blocks == 0
        other.close()
        with pytest.raises(StoreError, match="made for"):
            Store(path)

    def test_what_is_no_store_is_never_touched(self, tmp_path: Path) -> None:
        letter = tmp_path / "letter"
        for text in ("Dear reader,", "x" * 10_000):
            letter.write_text(text)
            for reset in (False, True):
                with pytest.raises(StoreError, match="no block store"):
                    Store(letter, reset=reset)
            assert letter.read_text() == text
        assert os.listdir(tmp_path) == ["letter"]

    def test_a_store_of_another_size_is_begun_anew(self, path: Path) -> None:
        store, chain = Store(path, extents=8), chain_of(IDS)
        store.save(chain, [0])
        store.close()
        store = Store(path, extents=5)
        assert store.store.blocks == 0
        assert path.stat().st_size == Layout(BLOCK_TOKENS, (64,), 5).file_bytes
        store.close()

    def test_a_later_version_disables_the_store_until_it_may_be_replaced(self, path: Path) -> None:
        Store(path).close()
        with path.open("r+b") as file:
            for page in (0, PAGE):
                file.seek(page + 8)
                file.write(b"\x63")
        before = path.read_bytes()
        store = Store(path)
        assert store.store.faults == 1
        assert not store.store.wants(0, chain_of(IDS)[0])
        store.close()
        assert path.read_bytes() == before
        store = Store(path, reset=True)
        assert store.store.wants(0, chain_of(IDS)[0])
        store.close()


def _hold(path: Path, ready: Event, end: Event) -> None:
    store = Store(path)
    store.save(chain_of(IDS), [0])
    ready.set()
    end.wait(30)
    store.close()


class TestSharing:
    def test_a_second_opener_hears_who_holds_it_or_only_reads(self, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ready, end = context.Event(), context.Event()
        holder = context.Process(target=_hold, args=(path, ready, end))
        holder.start()
        try:
            assert ready.wait(60)
            with pytest.raises(StoreError, match=rf"held by process {holder.pid} on .*ro"):
                Store(path)
            reader, chain = Store(path, mode="ro"), chain_of(IDS)
            assert reader.read(chain, 0) == content(0, 0, 64)
            assert not reader.store.wants(0, chain[1])
            reader.store.touch(0, chain[0])
            before = path.read_bytes()
            reader.close()
            assert path.read_bytes() == before
        finally:
            end.set()
            holder.join(30)
        Store(path).close()

    def test_two_in_one_process_do_not_share_either(self, path: Path) -> None:
        store = Store(path)
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            Store(path)
        store.close()
        Store(path).close()

    def test_a_reader_needs_a_store(self, path: Path) -> None:
        with pytest.raises(StoreError, match="No such file"):
            Store(path, mode="ro")
        path.touch()
        with pytest.raises(StoreError, match="empty"):
            Store(path, mode="ro")
        with pytest.raises(StoreError, match="no block store can be opened there"):
            Store(path.parent / "none" / "blocks")
        with pytest.raises(StoreError, match="no block store can be opened there"):
            Store(path.parent)


class TestFaults:
    @pytest.mark.parametrize("operation", ["open", "lock", "read", "write", "resize"])
    def test_a_disk_that_fails_at_once_disables_the_store(
        self, path: Path, operation: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = FaultyDisk()
        disk.failing[operation] = OSError(errno.EIO, "the disk is ill")
        with caplog.at_level(logging.WARNING, logger="asyncllm"):
            store = Store(path, layer=disk)
        assert store.store.faults == 1
        assert [r.message.split()[0] for r in caplog.records] == ["store-fault"]
        chain = chain_of(IDS)
        assert not store.store.has(0, chain[0])
        assert not store.store.wants(0, chain[0])
        store.close()
        Store(path).close()

    def test_a_full_disk_ends_writing_not_reading(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = FaultyDisk()
        store, chain = Store(path, layer=disk), chain_of(IDS)
        store.save(chain, [0])
        disk.failing["write"] = OSError(errno.ENOSPC, "no space left")
        with caplog.at_level(logging.WARNING, logger="asyncllm"):
            store.save(chain, [1, 2, 3])
        assert [r.message.split()[0] for r in caplog.records] == ["store-fault"]
        found = store.store
        assert (found.written_blocks, found.dropped_blocks, found.faults) == (1, 1, 1)
        assert store.read(chain, 0) == content(0, 0, 64)
        assert store.read(chain, 1) is None
        store.close()

    def test_faults_in_a_row_disable_the_store(self, path: Path) -> None:
        disk = FaultyDisk()
        store, chain = Store(path, layer=disk), chain_of(IDS)
        store.save(chain, range(5))
        disk.failing["read"] = OSError(errno.EIO, "the disk is ill")
        assert [store.read(chain, number) for number in range(5)] == [None] * 5
        assert store.store.faults == 3, "the others were not tried"
        assert store.store.rejected_blocks == 0
        disk.failing.clear()
        assert store.read(chain, 4) is None
        store.close()

    def test_one_fault_costs_one_block(self, path: Path) -> None:
        disk = FaultyDisk()
        store, chain = Store(path, layer=disk), chain_of(IDS)
        store.save(chain, range(3))
        disk.failing["read"] = OSError(errno.EIO, "the disk is ill")
        assert store.read(chain, 0) is None
        disk.failing.clear()
        assert store.read(chain, 1) == content(0, 1, 64)
        store.close()

    def test_short_reads_and_writes_are_gone_on_with(self, path: Path) -> None:
        disk = FaultyDisk()
        disk.short = 7
        store, chain = Store(path, layer=disk), chain_of(IDS)
        store.save(chain, [0])
        assert store.read(chain, 0) == content(0, 0, 64)
        store.close()

    def test_a_file_cut_short_under_us_has_only_misses(self, path: Path) -> None:
        store, chain = Store(path), chain_of(IDS)
        store.save(chain, range(4))
        os.truncate(path, Layout(BLOCK_TOKENS, (64,), 8).extent_offset(0, 2) + 10)
        found = [store.read(chain, number) for number in range(4)]
        assert found == [content(0, 0, 64), content(0, 1, 64), None, None]
        assert store.store.rejected_blocks == 2
        store.save(chain, [4])
        assert store.read(chain, 4) == content(0, 4, 64)
        os.truncate(path, 0)
        assert store.read(chain, 0) is None
        store.close()

    def test_a_deleted_file_is_written_no_more(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("asyncllm.kv.store.STAMPS_EVERY_S", 0.0)
        store, chain = Store(path), chain_of(IDS)
        store.save(chain, [0])
        path.unlink()
        for number in range(1, 8):
            store.save(chain, [number])
            if not store.store.wants(0, chain[9]):
                break
            time.sleep(0.02)
        assert not store.store.wants(0, chain[9])
        assert store.store.faults >= 1
        store.close()
        assert not path.exists()

    def test_closing_does_not_wait_for_a_disk_that_does_not_answer(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("asyncllm.kv.store.CLOSE_PATIENCE_S", 0.05)
        disk = FaultyDisk()
        store, chain = Store(path, layer=disk), chain_of(IDS)
        store.save(chain, [0])
        disk.gate.clear()
        assert store.store.begin_read(0, chain[0], 0)
        started = time.perf_counter()
        store.close()
        assert time.perf_counter() - started < 1
        disk.gate.set()


class TestTool:
    def test_it_says_what_is_in_a_store_reads_all_of_it_and_empties_it(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store, chain = Store(path, sizes=(64, 100)), chain_of(IDS)
        store.save(chain, range(3), 0)
        store.save(chain, range(2), 1)
        assert main(["store", "info", str(path), "--json"]) == 0, "also while it is in use"
        told = json.loads(capsys.readouterr().out)
        assert told["name"] == "tiny"
        assert told["fingerprint"] == FINGERPRINT.hex()
        assert told["file_bytes"] == path.stat().st_size
        assert [group["blocks"] for group in told["groups"]] == [3, 2]
        assert main(["store", "clear", str(path)]) == 1
        assert "held by process" in capsys.readouterr().err
        store.close()
        assert main(["store", "info", str(path)]) == 0
        assert "layer group 1      2 of 8 blocks of 100 bytes" in capsys.readouterr().out
        assert main(["store", "verify", str(path)]) == 0
        assert capsys.readouterr().out.startswith("5 blocks are whole, 0 are not")
        with path.open("r+b") as file:
            file.seek(Layout(BLOCK_TOKENS, (64, 100), 8).extent_offset(1, 0) + 7)
            file.write(b"?")
        assert main(["store", "verify", str(path), "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"whole": 4, "broken": 1}
        size = path.stat().st_size
        assert main(["store", "clear", str(path)]) == 0
        assert path.stat().st_size == size
        store = Store(path, sizes=(64, 100))
        assert store.store.blocks == 0
        store.close()

    @pytest.mark.parametrize("action", ["info", "verify", "clear"])
    def test_what_is_no_store_is_told_in_one_line_and_left_alone(
        self, path: Path, action: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["store", action, str(path)]) == 1
        assert not path.exists()
        path.write_text("Dear reader")
        assert main(["store", action, str(path)]) == 1
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 2
        assert "there is no such file" in errors[0]
        assert "no block store" in errors[1]
        assert path.read_text() == "Dear reader"


def test_a_store_without_a_file_layer_of_its_own_uses_the_systems(path: Path) -> None:
    slots = [memoryview(bytearray(64)) for _ in range(8)]
    store = BlockStore(
        path,
        fingerprint=FINGERPRINT,
        name="x" * 500,
        block_tokens=BLOCK_TOKENS,
        extent_bytes=(64,),
        limit_bytes=1 << 20,
        slots=slots,
    )
    store.close()
    assert path.stat().st_size <= 1 << 20
    assert path.stat().st_mode & 0o077 == 0, "prompts are nobody else's to read"


def test_kills_under_load_leave_a_store_that_opens_and_serves_no_wrong_byte() -> None:
    script = Path(__file__).parent.parent / "scripts" / "crash_store.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rounds", "10", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(script.parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"10 kills: [1-9]\d* blocks whole, \d+ torn and refused, none wrong\n", done.stdout
    )
