"""Damaged store files: no exception escapes, no wrong byte is served."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import StoreError
from asyncllm.kv.store import read_indexes
from asyncllm.kv.store_file import StoreFile
from asyncllm.kv.store_layout import PAGE, NotAStore
from asyncllm.kv.store_thread import ReadJob, perform
from tests.store_disks import FINGERPRINT, MemoryDisk, Store, chain_of, content

IDS = list(range(100, 200))


def mutate(data: bytearray, rng: random.Random) -> None:
    """Damage some of it, anywhere."""
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if rng.random() < 0.5:  # where something is
        at = rng.choice([rng.randrange(64), PAGE + rng.randrange(64), 3 * PAGE + at % 1024])
    length = rng.choice([1, 1, 8, 64, 500])
    if kind == 0:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + length] = rng.randbytes(len(data[at : at + length]))
    elif kind == 2:
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == 3:
        del data[at:]
    elif kind == 4:  # a piece of the file in another place
        start = rng.randrange(len(data))
        piece = data[start : start + length]
        data[at : at + len(piece)] = piece
    else:
        data[at : at + length] = b"\xff" * len(data[at : at + length])


def made() -> tuple[bytes, dict[tuple[int, bytes], bytes]]:
    """A store's bytes, and what each block of it must read as."""
    disk, chain = MemoryDisk(), chain_of(IDS)
    store = Store(Path("memory"), sizes=(64, 48), layer=disk)
    expected = {}
    for group, size in enumerate(store.sizes):
        store.save(chain, range(8), group)
        for number in range(8):
            expected[group, chain[number].key] = content(group, number, size)
    store.close()
    return bytes(disk.content), expected


def test_ten_thousand_mutations_serve_no_wrong_byte() -> None:
    whole, expected = made()
    rng = random.Random(20261201)
    served = refused = 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 4])):
            if data:
                mutate(data, rng)
        disk = MemoryDisk(bytes(data))
        file = StoreFile(Path("memory"), "rw", disk)
        try:
            superblock = file.superblock()
        except NotAStore:
            refused += 1
            continue
        if superblock is None or superblock.fingerprint != FINGERPRINT:
            assert not data
            continue
        slot = memoryview(bytearray(64))
        for group, index in enumerate(read_indexes(file, superblock)):
            for stored in index.blocks():
                job = ReadJob(group, stored.extent, stored.header, 0, None)
                perform(job, file, superblock.layout, FINGERPRINT, [slot])
                if job.good:
                    served += 1
                    size = superblock.layout.extent_bytes[group]
                    assert slot[:size] == expected[group, stored.header.key]
    assert served > 50_000
    assert refused > 100


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_mutated_store_goes_on(seed: int) -> None:
    whole, _ = made()
    data, rng = bytearray(whole), random.Random(seed)
    mutate(data, rng)
    chain = chain_of(IDS)
    try:
        store = Store(Path("memory"), sizes=(64, 48), layer=MemoryDisk(bytes(data)))
    except StoreError:
        return  # what is left is no store, or not this model's
    for group, size in enumerate(store.sizes):
        for number in range(8):
            assert store.read(chain, number, group) in (None, content(group, number, size))
        store.save(chain, range(8, 12), group)
        for number in range(8, 12):
            assert store.read(chain, number, group) in (None, content(group, number, size))
    store.close()
