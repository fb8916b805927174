"""Kill a process that writes a block store, again and again, and look at what is left.

Usage: python scripts/crash_store.py [--rounds 200] [--seed 0] [--file PATH]

In each round a child opens the store, writes blocks whose bytes follow from their tokens, reads
some and touches others, as fast as it can, and gets SIGKILL after a random time. The parent then
opens the file: that must succeed, and every block that verifies must have the bytes that follow
from its tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from xxhash import xxh3_128_digest

from asyncllm.kv.prefix import Chain, PrefixIndex
from asyncllm.kv.store import BlockStore, read_indexes
from asyncllm.kv.store_file import StoreFile
from asyncllm.kv.store_thread import ReadJob, perform

FINGERPRINT = b"the crash test's"
BLOCK_TOKENS = 16
SIZES = (800_000, 90_000)  # many pages, so that a kill may come in the middle
LIMIT_BYTES = 24 << 20
LONGEST_LOAD_S = 0.12


def content(group: int, tokens: bytes, parent: bytes) -> bytes:
    """The bytes that a block must have."""
    piece = xxh3_128_digest(b"%d" % group + parent + tokens)
    return (piece * (SIZES[group] // len(piece) + 1))[: SIZES[group]]


def load(path: Path, seed: int) -> None:
    """Write, read and touch until killed."""
    rng = random.Random(seed)
    slots = [memoryview(bytearray(max(SIZES))) for _ in range(16)]
    store = BlockStore(
        path,
        fingerprint=FINGERPRINT,
        name="crash test",
        block_tokens=BLOCK_TOKENS,
        extent_bytes=SIZES,
        limit_bytes=LIMIT_BYTES,
        slots=slots,
    )
    index = PrefixIndex(FINGERPRINT, BLOCK_TOKENS)
    while True:
        stem = rng.randrange(1 << 20)
        tokens = [stem + at for at in range(BLOCK_TOKENS * rng.randint(1, 8))]
        chain = Chain(index, b"")
        chain.reach(lambda a, b, tokens=tokens: tokens[a:b], len(tokens) // BLOCK_TOKENS)  # type: ignore[misc]
        for prefix in chain:
            for group, size in enumerate(SIZES):
                while (transfer := store.begin_save(group, 0, prefix)) is None:
                    finish(store, slots)
                assert prefix.parent is not None
                slots[transfer.slot][:size] = content(group, prefix.tokens, prefix.parent.key)
                store.end_save(transfer, prefix)
                if rng.random() < 0.3 and store.has(group, chain[0]):
                    store.touch(group, chain[0])
                    store.begin_read(group, chain[0], (group, chain[0]))
        finish(store, slots)


def finish(store: BlockStore, slots: list[memoryview]) -> None:
    for (group, prefix), slot in store.poll():
        if slot is not None:
            right = content(group, prefix.tokens, prefix.parent.key)
            if slots[slot][: SIZES[group]] != right:
                os._exit(3)  # a wrong byte was served
            store.free(slot)


def look(path: Path) -> tuple[int, int]:
    """Blocks that are whole and blocks that are not, of a file that a kill left behind."""
    file = StoreFile(path, "rw")
    try:
        superblock = file.superblock()
        if superblock is None:  # killed before anything was written
            return 0, 0
        slot, counts = memoryview(bytearray(max(SIZES))), [0, 0]
        for group, index in enumerate(read_indexes(file, superblock)):
            for stored in index.blocks():
                job = ReadJob(group, stored.extent, stored.header, 0, None)
                perform(job, file, superblock.layout, FINGERPRINT, [slot])
                counts[not job.good] += 1
                right = content(group, stored.header.tokens, stored.header.parent)
                if job.good and slot[: SIZES[group]] != right:
                    raise SystemExit(f"a wrong block would be served: {stored}")
        return counts[0], counts[1]
    finally:
        file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.file or Path(directory) / "blocks"
        whole = torn = 0
        for number in range(arguments.rounds):
            child = os.fork()
            if child == 0:
                try:
                    load(path, rng.randrange(1 << 30) + number)
                finally:
                    os._exit(2)  # it never ends by itself
            time.sleep(rng.random() * LONGEST_LOAD_S)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                raise SystemExit(f"round {number}: the child ended with {os.WEXITSTATUS(status)}")
            found = look(path) if path.exists() else (0, 0)
            whole, torn = whole + found[0], torn + found[1]
            if path.exists() and path.stat().st_size > LIMIT_BYTES:
                raise SystemExit(f"round {number}: the file is larger than it may be")
    print(f"{arguments.rounds} kills: {whole} blocks whole, {torn} torn and refused, none wrong")


if __name__ == "__main__":
    main()
