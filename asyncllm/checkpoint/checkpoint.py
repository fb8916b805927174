"""A checkpoint as the rest of the engine sees it: an architecture, metadata, tensors.

Tensors stay packed and mapped; nothing of them is read before someone looks at it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncllm.checkpoint.formats import Format
from asyncllm.checkpoint.gguf_file import MAGIC, GGUFFile, TensorEntry, describe_content
from asyncllm.errors import CorruptCheckpointError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")

_PART: Final = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)
_SUPPORTED: Final = "supported today: .gguf files, whole or split (NAME-00001-of-0000N.gguf)"
_REQUIRED: Final[Any] = object()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, packed, where it lies in the mapped file.

    Attributes:
        name: The checkpoint's own name for it.
        shape: As torch has it, rows first.
        format: How the weights are stored.
        nbytes: Bytes of `data`.
        data: uint8 `[nbytes]`, a read-only view of the map.
        source: File name and byte offset, for messages.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    nbytes: int
    data: np.ndarray[Any, np.dtype[np.uint8]]
    source: str

    @property
    def columns(self) -> int:
        """Weights in a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of all leading dimensions together; 1 for a vector."""
        return self.nbytes // self.format.row_bytes(self.columns)

    def packed(self) -> torch.Tensor:
        """The bytes as torch's uint8 `[rows, row_bytes]`, not copied; what `Format.unpack` takes.

        It shares memory with the map and is not to be written to. Writing would neither fail nor
        reach the file, but it would take memory.
        """
        import torch

        # The map is private and writable; only the view forbids it, and torch would warn of that.
        view = self.data[:]
        view.flags.writeable = True
        return torch.from_numpy(view).view(self.rows, -1)


class Checkpoint:
    """An open checkpoint. Close it, or use it as a context manager; arrays made from it stay valid.

    Attributes:
        path: As given to `open_checkpoint`.
        architecture: `general.architecture`, as `"llama"`.
        metadata: Keys and values: int, float, bool, str; arrays of numbers as read-only numpy
            arrays, arrays of strings as lists of str in which bytes that are no UTF-8 appear as
            U+FFFD (`byte_strings` has them as they are). Arrays are decoded at their first use.
        tensors: By name, in the order of the files.
        nbytes: Size of the file, or of all parts together.
    """

    def __init__(self, path: Path, files: Sequence[GGUFFile]) -> None:
        self.path = path
        self._files = files
        self._metadata = files[0].metadata
        self.metadata: Mapping[str, Any] = self._metadata
        self.nbytes = sum(file.nbytes for file in files)
        self.architecture = self.get("general.architecture", str)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {entry.name: _info(file, entry) for file in files for entry in file.tensors.values()}
        )

    def get(self, key: str, kind: type[T], default: T = _REQUIRED) -> T:
        """The value of `key`, which must be a `kind`: int, float, bool, str, list or numpy.ndarray.

        A float may be stored as an integer; a bool never passes for an int.

        Raises:
            CorruptCheckpointError: There is no such key and no default, or the value is of another
                type; the message has the key, the type found and the one expected.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise CorruptCheckpointError(
                    f"{self.path}: metadata {key!r} is missing; a {kind.__name__} is expected"
                )
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CorruptCheckpointError(
                f"{self.path}: metadata {key!r} is {self._metadata.type_name(key)}; "
                f"a {kind.__name__} is expected"
            )
        return value

    def string_array(self, key: str) -> list[str]:
        """An array of strings; bytes that are no UTF-8 appear as U+FFFD.

        Raises:
            CorruptCheckpointError: `key` is missing or no array of strings.
        """
        self._strings_expected(key)
        strings: list[str] = self.metadata[key]
        return strings

    def byte_strings(self, key: str) -> list[bytes]:
        """An array of strings as the bytes in the file, made anew at each call.

        Raises:
            CorruptCheckpointError: `key` is missing or no array of strings.
        """
        self._strings_expected(key)
        return self._metadata.byte_strings(key)

    def _strings_expected(self, key: str) -> None:
        found = self._metadata.type_name(key) if key in self.metadata else "missing"
        if found != "array of string":
            raise CorruptCheckpointError(
                f"{self.path}: metadata {key!r} is {found}; an array of strings is expected"
            )

    def close(self) -> None:
        """Lets go of the files. Each is unmapped when no array looks into it any more."""
        self.tensors = MappingProxyType({})
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF file, known by its content, or a split set by any of its parts.

    Raises:
        UnsupportedModelError: The file is of another kind; the message says of which, and what is
            supported.
        CorruptCheckpointError: The file contradicts itself, or is named .gguf and is none.
        ModelLoadError: There is no such file, it is a directory or cannot be read, or a part of
            its set is missing.
    """
    path = Path(path)
    if path.suffix.lower() != ".gguf":
        _refuse_other_formats(path)
    files = [GGUFFile(path)]
    try:
        files = _all_parts(files[0])
        return Checkpoint(path, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _refuse_other_formats(path: Path) -> None:
    try:
        if not path.is_file():
            return  # GGUFFile says what is wrong with it
        with path.open("rb") as file:
            head = file.read(64)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not head.startswith((MAGIC, MAGIC[::-1])):
        raise UnsupportedModelError(f"{path} is {describe_content(head)}; {_SUPPORTED}")


def _info(file: GGUFFile, entry: TensorEntry) -> TensorInfo:
    import numpy as np

    data = np.frombuffer(file.buffer, np.uint8, entry.nbytes, entry.start)
    data.flags.writeable = False
    source = f"{file.path.name}, byte {entry.start}"
    return TensorInfo(entry.name, entry.shape, entry.format, entry.nbytes, data, source)


def _split(file: GGUFFile) -> tuple[int, int]:
    """Which part of how many a file says it is, counted from 0; (0, 1) for a whole one."""
    part, parts = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1)
    if type(part) is not int or type(parts) is not int or not 0 <= part < max(parts, 1):
        raise CorruptCheckpointError(f"{file.path}: split.no {part!r} of split.count {parts!r}")
    return part, max(parts, 1)


def _all_parts(opened: GGUFFile) -> list[GGUFFile]:
    """The parts of the set that `opened` belongs to, in order; closes none but on an error."""
    part, parts = _split(opened)
    if parts == 1:
        return [opened]
    path, named = opened.path, _PART.fullmatch(opened.path.name)
    if named is None or (int(named["part"]), int(named["parts"])) != (part + 1, parts):
        raise CorruptCheckpointError(
            f"{path} is part {part + 1} of {parts}, but not named so: "
            f"NAME-{part + 1:05d}-of-{parts:05d}.gguf is expected"
        )
    files: list[GGUFFile] = []
    try:
        for index in range(parts):
            sibling = path.with_name(f"{named['stem']}-{index + 1:05d}-of-{parts:05d}.gguf")
            files.append(opened if index == part else _part(sibling, path))
        _check_set(files)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _part(path: Path, asked_for: Path) -> GGUFFile:
    try:
        return GGUFFile(path)
    except ModelLoadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ModelLoadError(
                f"{path} is missing; {asked_for.name} is of a set that needs it"
            ) from error.__cause__
        raise


def _check_set(files: Sequence[GGUFFile]) -> None:
    """Parts that were made together: they agree on their number and on the tensors in all."""
    first, owners = files[0], dict[str, GGUFFile]()
    for index, file in enumerate(files):
        if _split(file) != (index, len(files)):
            part, parts = _split(file)
            raise CorruptCheckpointError(
                f"{file.path} says it is part {part + 1} of {parts}, where part {index + 1} of "
                f"{len(files)} is expected; it is from another set than {first.path.name}"
            )
        for name in file.tensors:
            if name in owners:
                raise CorruptCheckpointError(
                    f"tensor {name!r} is both in {owners[name].path} and in {file.path}; "
                    "they are parts of two sets"
                )
            owners[name] = file
    for file in files:
        expected = file.metadata.get("split.tensors.count", len(owners))
        if expected != len(owners):
            raise CorruptCheckpointError(
                f"{file.path} is of a set of {expected} tensors, but the {len(files)} parts "
                f"from {first.path.name} on have {len(owners)}; they are parts of two sets"
            )
