"""A GGUF file, versions 2 and 3, little endian: mapped, checked, and read where it lies.

The format is described in ggml's `docs/gguf.md`. A file is believed in nothing: each count, length
and offset is compared with the bytes that are left before anything is made from it. Nothing is
copied at opening but keys, scalars and names; arrays are decoded when first asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from asyncllm.checkpoint.formats import FORMATS, UNSUPPORTED, Format
from asyncllm.errors import CorruptCheckpointError, ModelLoadError, UnsupportedModelError

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
# Real files nest arrays not at all; the depth is bounded since decoding recurses.
_MAX_NESTING: Final = 8
_MAX_KEY_BYTES: Final = 65_535

_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4
# Value type: the struct letter of a scalar and the numpy name of an array's elements.
_SCALARS: Final[Mapping[int, tuple[str, str]]] = {
    0: ("B", "<u1"),
    1: ("b", "<i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    _UINT32: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    _BOOL: ("?", "|b1"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
_TYPE_NAMES: Final = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"),
    *("bool", "string", "array", "uint64", "int64", "float64"),
)

# The least a metadata entry (key length, key, type, value) and a tensor's entry (name length,
# name, dimensions, one dimension, type, offset) take: what bounds their counts.
_LEAST_ENTRY_BYTES: Final = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8

_LOOKS_LIKE: Final = (
    (b"<!doctype html", "an HTML page, as a failed download leaves"),
    (b"<html", "an HTML page, as a failed download leaves"),
    (b"<?xml", "an XML document, as a failed download leaves"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"{", "a JSON document"),
    (b"pk\x03\x04", "a zip archive, as PyTorch checkpoints are"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"tjgg", "a GGJT file, a format older than GGUF; convert it"),
    (b"lmgg", "a GGML file, a format older than GGUF; convert it"),
    (b"fmgg", "a GGMF file, a format older than GGUF; convert it"),
)


def describe_content(head: bytes) -> str:
    """What a file that begins with `head` (64 bytes are enough) seems to be, in words."""
    if not head:
        return "empty"
    if head.startswith(MAGIC):
        return "a GGUF file"
    if head.startswith(MAGIC[::-1]):
        return "a big-endian GGUF file"
    if not head.strip(b"\0"):
        return "zero bytes, as an unfinished download leaves"
    if len(head) > 8 and head[8:9] == b"{":
        return "a safetensors file"
    start = head.lstrip().lower()
    for magic, what in _LOOKS_LIKE:
        if start.startswith(magic):
            return what
    return f"no format known here (it begins with {head[:8].hex(' ')})"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` and `nbytes` count from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that nobody has asked for: `count` elements of `kind`, from byte `start`."""

    kind: int
    count: int
    start: int


class GGUFFile:
    """One mapped GGUF file.

    Attributes:
        path: As given.
        version: 2 or 3.
        nbytes: Size of the file.
        metadata: Keys and values; arrays of numbers are read-only numpy views of the map, arrays
            of strings lists of str in which bytes that are no UTF-8 appear as U+FFFD.
        tensors: By name, in the order of the file.

    Raises:
        CorruptCheckpointError: The file contradicts itself or is no GGUF file.
        UnsupportedModelError: It is sound, but has a tensor of a type that cannot be unpacked.
        ModelLoadError: There is no such file, or it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = map_file(self.path)
        self.nbytes = len(self._map)
        try:
            reader = _Reader(self.path, self._map)
            self.version, entries, tensors = reader.header()
            self.metadata = Metadata(reader, reader.metadata(entries))
            self.tensors = reader.tensors(tensors)
        except BaseException:
            self.close()
            raise

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped file. Writing to it would change private copies of pages, never the file."""
        return self._map

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last array that still looks into it."""
        # Arrays made from the map hold it (BufferError); it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole regular file privately: pages are the page cache's until someone writes."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ModelLoadError(f"{path} is a directory; give the path of a .gguf file")
        if not stat.S_ISREG(found.st_mode):
            raise ModelLoadError(f"{path} is no regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CorruptCheckpointError(f"{path} is empty (0 bytes)")
            return _map(file.fileno())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a zero byte in it, or a file cut to nothing this very moment.
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _map(descriptor: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # A private writable map, so that torch takes views of it without a warning; not counted
    # against the memory that may be promised, or a model larger than the RAM would be refused.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(
        descriptor,
        0,
        flags=mmap.MAP_PRIVATE | no_reserve,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )


class Metadata(Mapping[str, Any]):
    """Keys and values of a GGUF file; arrays are decoded at their first use and kept."""

    def __init__(self, reader: _Reader, values: Mapping[str, Any]) -> None:
        self._reader = reader
        self._values = values
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _Array):
            return value
        if key not in self._decoded:
            self._decoded[key] = self._reader.decode(value)
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        # The inherited one would decode the array to find out.
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def type_name(self, key: str) -> str:
        """The type of a value in GGUF's words, as `"uint32"` or `"array of string"`."""
        value = self._values[key]
        if isinstance(value, _Array):
            return f"array of {_TYPE_NAMES[value.kind]}"
        return self._reader.type_names[key]

    def byte_strings(self, key: str) -> list[bytes]:
        """An array of strings as the bytes in the file; TypeError where it is none."""
        value = self._values[key]
        if not isinstance(value, _Array) or value.kind != _STRING:
            raise TypeError(f"{key!r} is {self.type_name(key)}, no array of strings")
        return self._reader.strings(value)[0]


class _Reader:
    """Walks a map from its beginning; every step is checked against the end first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.alignment = _DEFAULT_ALIGNMENT
        self.type_names: dict[str, str] = {}

    def fail(self, message: str, at: int) -> NoReturn:
        raise CorruptCheckpointError(f"{self.path}: {message} (byte {at})")

    def _need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.at:
            self.fail(
                f"file has {self.size} bytes, {what} needs {self.at + nbytes}; "
                "the file is cut short or damaged",
                self.at,
            )

    def _number(self, letter: str, what: str) -> Any:
        size = struct.calcsize("<" + letter)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += size
        return value

    def _text(self, what: str) -> str:
        start, length = self.at, self._number("Q", f"the length of {what}")
        self._need(length, f"{what} ({length} bytes)")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 at its byte {error.start}: {raw[:40]!r}", start)

    def _name(self, what: str) -> str:
        """A key or a tensor's name: some text, neither empty nor of absurd length."""
        start = self.at
        self._need(8, f"the length of {what}")
        (length,) = struct.unpack_from("<Q", self.data, start)
        if not 1 <= length <= _MAX_KEY_BYTES:
            self.fail(
                f"{what} has a length of {length} bytes; 1 to {_MAX_KEY_BYTES} are possible", start
            )
        return self._text(what)

    def header(self) -> tuple[int, int, int]:
        """Version, metadata count and tensor count."""
        head = self.data[:64]
        if not head.startswith(MAGIC):
            if len(head) < len(MAGIC) and MAGIC.startswith(head):
                self._need(24, "the GGUF header")
            self.fail(f"this is no GGUF file but {describe_content(head)}", 0)
        self.at = len(MAGIC)
        version = self._number("I", "the GGUF version")
        if version and version & 0xFFFF == 0:
            self.fail("this is a big-endian GGUF file; only little-endian ones are read", 4)
        if version not in _VERSIONS:
            self.fail(f"GGUF version {version}; versions 2 and 3 are read", 4)
        tensors = self._number("Q", "the tensor count")
        entries = self._number("Q", "the metadata count")
        for what, at, count, least in (
            ("metadata", 16, entries, _LEAST_ENTRY_BYTES),
            ("tensor", 8, tensors, _LEAST_TENSOR_BYTES),
        ):
            if count * least > self.size - self.at:
                self.fail(
                    f"file has {self.size} bytes, a {what} count of {count} needs at least "
                    f"{self.at + count * least}; the file is cut short or damaged",
                    at,
                )
        return version, entries, tensors

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            start = self.at
            key = self._name(f"metadata key {index} of {count}")
            if key in values:
                self.fail(f"metadata key {key!r} appears twice", start)
            values[key] = self._value(key)
        return values

    def _value(self, key: str) -> Any:
        what = f"metadata {key!r}"
        start, kind = self.at, self._number("I", f"the type of {what}")
        if kind < len(_TYPE_NAMES):
            self.type_names[key] = _TYPE_NAMES[kind]
        if key == "general.alignment":
            return self._alignment(kind)
        if kind in _SCALARS:
            at, value = self.at, self._number(_SCALARS[kind][0], what)
            if kind == _BOOL and self.data[at] > 1:
                self.fail(f"{what} is a bool of value {self.data[at]}; 0 and 1 are possible", at)
            return value
        if kind == _STRING:
            return self._text(what)
        if kind == _ARRAY:
            return self._array(what, nesting=1)
        self.fail(f"{what} has the unknown value type {kind}", start)

    def _array(self, what: str, nesting: int) -> _Array:
        """Steps over an array, checking it."""
        start = self.at
        if nesting > _MAX_NESTING:
            self.fail(f"{what} nests arrays more than {_MAX_NESTING} deep", start)
        kind = self._number("I", f"the element type of {what}")
        count = self._number("Q", f"the length of {what}")
        array = _Array(kind, count, self.at)
        if kind in _SCALARS:
            nbytes = count * struct.calcsize("<" + _SCALARS[kind][0])
            self._need(nbytes, f"{what} (an array of {count} {_TYPE_NAMES[kind]})")
            self.at += nbytes
        elif kind == _STRING:
            self._need(8 * count, f"{what} (an array of {count} strings)")
            self._skip_strings(what, count)
        elif kind == _ARRAY:
            self._need(12 * count, f"{what} (an array of {count} arrays)")
            for _ in range(count):
                self._array(what, nesting + 1)
        else:
            self.fail(f"{what} is an array of the unknown value type {kind}", start)
        return array

    def _skip_strings(self, what: str, count: int) -> None:
        # The one loop that runs hundreds of thousands of times: kept free of everything else.
        length_at, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        last -= 8
        for index in range(count):
            if at > last:
                self.at = at
                self._need(8, f"string {index} of {count} of {what}")
            (length,) = length_at(data, at)
            at += 8 + length
            if at > last + 8:
                self.at = at - length
                self._need(length, f"string {index} of {count} of {what} ({length} bytes)")
        self.at = at

    def decode(self, array: _Array) -> Any:
        """The elements of an array that `_array` has stepped over."""
        return self._decode(array)[0]

    def strings(self, array: _Array) -> tuple[list[bytes], int]:
        """The strings of an array and the byte after its end."""
        length_at, data, at = struct.Struct("<Q").unpack_from, self.data, array.start
        strings: list[bytes] = []
        append = strings.append
        for _ in range(array.count):
            (length,) = length_at(data, at)
            at += 8 + length
            append(data[at - length : at])
        return strings, at

    def _decode(self, array: _Array) -> tuple[Any, int]:
        """Elements and the byte after their end."""
        if array.kind == _STRING:
            strings, end = self.strings(array)
            return [string.decode("utf-8", "replace") for string in strings], end
        if array.kind == _ARRAY:
            nested, at = [], array.start
            for _ in range(array.count):
                kind, count = struct.unpack_from("<IQ", self.data, at)
                elements, at = self._decode(_Array(kind, count, at + 12))
                nested.append(elements)
            return nested, at
        import numpy as np

        dtype = np.dtype(_SCALARS[array.kind][1])
        values = np.frombuffer(self.data, dtype, array.count, array.start)
        end = array.start + values.nbytes
        if array.kind == _BOOL:
            values = values != 0
        values.flags.writeable = False
        return values, end

    def _alignment(self, kind: int) -> int:
        if kind != _UINT32:
            found = _TYPE_NAMES[kind] if kind < len(_TYPE_NAMES) else f"of type {kind}"
            self.fail(f"general.alignment is {found}, not uint32", self.at)
        at = self.at
        value: int = self._number("I", "general.alignment")
        # A power of two is 1 bit; the specification wants multiples of 8.
        if value < 8 or value & (value - 1) or value > self.size:
            self.fail(
                f"general.alignment is {value}; a power of two is expected, at least 8 and "
                f"no more than the file's {self.size} bytes",
                at,
            )
        self.alignment = value
        return value

    def tensors(self, count: int) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        places: dict[str, int] = {}
        for index in range(count):
            start = self.at
            name = self._name(f"the name of tensor {index} of {count}")
            if name in entries:
                self.fail(f"tensor {name!r} appears twice", start)
            entries[name], places[name] = self._tensor(name), start
        # Offsets count from the first aligned byte after the entries.
        origin = -(-self.at // self.alignment) * self.alignment
        entries = {
            name: dataclasses.replace(entry, start=origin + entry.start)
            for name, entry in entries.items()
        }
        self._check_places(entries, places)
        return entries

    def _tensor(self, name: str) -> TensorEntry:
        """One entry, its `start` still counted from the beginning of the data."""
        what, at = f"tensor {name!r}", self.at
        dimensions = self._number("I", f"the dimensions of {what}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"{what} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are known", at)
        sizes_at = self.at
        self._need(8 * dimensions, f"the sizes of {what}")
        sizes = struct.unpack_from(f"<{dimensions}Q", self.data, sizes_at)
        self.at += 8 * dimensions
        if 0 in sizes:
            self.fail(f"{what} has a dimension of zero in {list(sizes)}", sizes_at)
        elements = math.prod(sizes)
        if elements >= 1 << 63:
            self.fail(f"{what} overflows: {list(sizes)} are {elements} elements", sizes_at)
        type_at, type_id = self.at, self._number("I", f"the type of {what}")
        layout = FORMATS.get(type_id)
        if layout is None:
            if type_id in UNSUPPORTED:
                raise UnsupportedModelError(
                    f"{self.path}: {what} is stored as {UNSUPPORTED[type_id]}, which is not "
                    f"supported; known are {', '.join(row.name for row in FORMATS.values())}"
                )
            self.fail(f"{what} has the unknown type {type_id}", type_at)
        if sizes[0] % layout.block_elements:
            self.fail(
                f"{what} has rows of {sizes[0]} weights, no multiple of the "
                f"{layout.block_elements} in a block of {layout.name}",
                sizes_at,
            )
        offset_at, offset = self.at, self._number("Q", f"the offset of {what}")
        if offset % self.alignment:
            self.fail(f"{what} has offset {offset}, no multiple of {self.alignment}", offset_at)
        nbytes = elements // layout.block_elements * layout.block_bytes
        return TensorEntry(name, sizes[::-1], layout, offset, nbytes)

    def _check_places(self, entries: Mapping[str, TensorEntry], places: Mapping[str, int]) -> None:
        """Tensors lie inside the file and apart."""
        before: TensorEntry | None = None
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            end = entry.start + entry.nbytes
            if before is not None and entry.start < before.start + before.nbytes:
                self.fail(
                    f"tensor {entry.name!r} begins at byte {entry.start}, inside tensor "
                    f"{before.name!r} (bytes {before.start} to {before.start + before.nbytes})",
                    places[entry.name],
                )
            if end > self.size:
                self.fail(
                    f"file has {self.size} bytes, tensor {entry.name!r} needs {end}; "
                    "the file is cut short or damaged",
                    places[entry.name],
                )
            before = entry
