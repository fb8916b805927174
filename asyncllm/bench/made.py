"""A checkpoint of a real model's shape with random weights, to measure where no real one is."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from asyncllm import synthetic
from asyncllm.bench.workload import BenchError
from asyncllm.checkpoint.checkpoint import open_checkpoint


@asynccontextmanager
async def synthetic_checkpoint(
    name: str, keep: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> AsyncIterator[Path]:
    """Make a checkpoint, and take it away again.

    Args:
        name: of `synthetic.SHAPES`.
        keep: where it stays; one of that name that is there is taken as it is. `None`: in a
            temporary folder, until the end.
        say: told what is being done.

    Raises:
        BenchError: there is no such shape, or something else where it is to be kept.
    """
    if name not in synthetic.SHAPES:
        raise BenchError(f"synthetic={name!r}: accepted are {', '.join(synthetic.SHAPES)}")
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="asyncllm-bench-")
    try:
        path = Path(folder.name) / f"{name}.gguf" if keep is None else keep
        if not await asyncio.to_thread(_is_there, name, path):
            say(f"writes {path}")
            try:
                await asyncio.to_thread(_write, name, path)
            except OSError as error:
                raise BenchError(f"{path} cannot be written: {error}") from error
        yield path
    finally:
        await asyncio.to_thread(folder.cleanup)


def _is_there(name: str, path: Path) -> bool:
    if not path.exists():
        return False
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.get("general.name", str, "")
    if found != name:
        raise BenchError(f"{path} is there and is {found!r}, not {name!r}: give another path")
    return True


def _write(name: str, path: Path) -> None:
    """All of it or nothing."""
    part = path.with_name(f"{path.name}.part")
    try:
        synthetic.write(name, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
