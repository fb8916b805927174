"""Checkpoints open quickly and lazily; a broken one is refused by name, quickly and cheaply."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.checkpoint.gguf_file import GGUFFile, map_file
from asyncllm.errors import CorruptCheckpointError, ModelLoadError, UnsupportedModelError
from tests.gguf_bytes import (
    BY_NAME,
    Typed,
    entry,
    gguf,
    random_blocks,
    raw_gguf,
    string,
    tensor_entry,
    value_bytes,
)

ARCHITECTURE = entry("general.architecture", "llama")
RNG = np.random.default_rng(0)
Q4_1 = random_blocks(BY_NAME["Q4_1"], 3, 64, RNG)
F32 = random_blocks(BY_NAME["F32"], 1, 5, RNG)
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": Typed("string", ["a", "é", b"\xff\xfe", ""]),
    "tokenizer.ggml.scores": Typed("float32", [0.0, -1.5, 2.0, 3.0]),
}
SMALL = gguf(
    METADATA,
    {"token_embd.weight": ("Q4_1", (3, 64), Q4_1.tobytes()), "norm": ("F32", (5,), F32.tobytes())},
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


Write = Callable[..., Path]


def test_metadata_and_tensors_are_read_as_written(write: Write) -> None:
    with open_checkpoint(write(SMALL)) as checkpoint:
        assert checkpoint.architecture == "llama"
        assert checkpoint.metadata["llama.block_count"] == 2
        assert checkpoint.metadata["tokenizer.ggml.add_bos_token"] is True
        assert type(checkpoint.metadata["llama.rope.freq_base"]) is float
        assert list(checkpoint.metadata) == list(METADATA)
        assert "llama.block_count" in checkpoint.metadata
        assert "nothing" not in checkpoint.metadata
        assert checkpoint.nbytes == len(SMALL)
        assert list(checkpoint.tensors) == ["token_embd.weight", "norm"]
        embedding = checkpoint.tensors["token_embd.weight"]
        assert (embedding.shape, embedding.rows, embedding.columns) == ((3, 64), 3, 64)
        assert embedding.format is BY_NAME["Q4_1"]
        assert embedding.nbytes == 120
        assert embedding.data.tobytes() == Q4_1.tobytes()
        assert embedding.source.startswith("model.gguf, byte ")
        norm = checkpoint.tensors["norm"]
        assert (norm.shape, norm.rows, norm.columns) == ((5,), 1, 5)
        assert norm.data.tobytes() == F32.tobytes()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[("uint8", 200), ("int8", -100), ("uint16", 60_000), ("int16", -30_000)],
        *[("uint32", 2**32 - 1), ("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63))],
        *[("float32", 1.5), ("float64", 0.1), ("bool", False), ("string", "é\n")],
    ],
)
def test_every_scalar_type_is_a_plain_python_value(write: Write, kind: str, value: Any) -> None:
    content = gguf({"general.architecture": "x", "value": Typed(kind, value)})
    with open_checkpoint(write(content)) as checkpoint:
        assert checkpoint.metadata["value"] == value
        assert type(checkpoint.metadata["value"]) is type(value)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[("uint8", "u1"), ("int8", "i1"), ("uint16", "u2"), ("int16", "i2"), ("uint32", "u4")],
        *[("int32", "i4"), ("uint64", "u8"), ("int64", "i8"), ("float32", "f4")],
        *[("float64", "f8"), ("bool", "?")],
    ],
)
def test_arrays_of_numbers_are_read_only_numpy_arrays(write: Write, kind: str, dtype: str) -> None:
    for values in ([1, 0, 1, 1], []):
        content = gguf({"general.architecture": "x", "value": Typed(kind, values)})
        with open_checkpoint(write(content)) as checkpoint:
            found = checkpoint.metadata["value"]
            assert found.dtype == np.dtype(dtype)
            assert found.tolist() == values
            assert not found.flags.writeable
            assert checkpoint.metadata["value"] is found


def test_arrays_of_arrays_are_lists(write: Write) -> None:
    rows = [Typed("int32", [1, 2]), Typed("string", ["a", ""]), Typed("int32", [])]
    content = gguf({"general.architecture": "x", "value": Typed("array", rows), "after": 1})
    with open_checkpoint(write(content)) as checkpoint:
        first, second, third = checkpoint.metadata["value"]
        assert first.tolist() == [1, 2]
        assert second == ["a", ""]
        assert third.tolist() == []
        assert checkpoint.metadata["after"] == 1


def test_tokens_that_are_no_utf8_are_replaced_in_text_and_kept_in_bytes(write: Write) -> None:
    with open_checkpoint(write(SMALL)) as checkpoint:
        tokens = checkpoint.string_array("tokenizer.ggml.tokens")
        assert tokens == ["a", "é", "��", ""]
        assert checkpoint.byte_strings("tokenizer.ggml.tokens")[1:3] == ["é".encode(), b"\xff\xfe"]


def test_version_2_and_other_alignments_are_read(write: Write) -> None:
    metadata = {"general.architecture": "llama", "general.alignment": 64}
    tensors = {"a": ("F32", (5,), F32.tobytes()), "b": ("F32", (5,), F32.tobytes())}
    with open_checkpoint(write(gguf(metadata, tensors, version=2, alignment=64))) as checkpoint:
        assert checkpoint.tensors["b"].data.tobytes() == F32.tobytes()


def test_a_vocabulary_without_tensors_opens(write: Write) -> None:
    with open_checkpoint(write(gguf(METADATA))) as checkpoint:
        assert checkpoint.tensors == {}
        assert len(checkpoint.string_array("tokenizer.ggml.tokens")) == 4


def test_content_decides_and_not_the_name(write: Write) -> None:
    with open_checkpoint(write(SMALL, "sha256-0123")) as checkpoint:
        assert checkpoint.architecture == "llama"


def test_typed_access_names_key_found_and_expected(write: Write) -> None:
    with open_checkpoint(write(SMALL)) as checkpoint:
        assert checkpoint.get("llama.block_count", int) == 2
        assert checkpoint.get("llama.block_count", float) == 2.0
        assert checkpoint.get("nothing", int, 5) == 5
        assert checkpoint.get("tokenizer.ggml.tokens", list)[0] == "a"
        assert checkpoint.get("tokenizer.ggml.scores", np.ndarray)[2] == 2.0
        for key, kind, found in (
            ("llama.block_count", str, "'llama.block_count' is uint32; a str is expected"),
            ("tokenizer.ggml.add_bos_token", int, "'tokenizer.ggml.add_bos_token' is bool; a int"),
            ("tokenizer.ggml.scores", float, "is array of float32; a float is expected"),
            ("nothing", int, "'nothing' is missing; a int is expected"),
        ):
            with pytest.raises(CorruptCheckpointError, match=found):
                checkpoint.get(key, kind)
        with pytest.raises(CorruptCheckpointError, match="array of float32; an array of strings"):
            checkpoint.string_array("tokenizer.ggml.scores")
        with pytest.raises(CorruptCheckpointError, match="is missing; an array of strings"):
            checkpoint.byte_strings("nothing")


def test_a_file_without_an_architecture_is_refused(write: Write) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"general\.architecture.* is missing"):
        open_checkpoint(write(gguf({"llama.block_count": 2})))


def test_packed_tensors_share_the_map_and_unpack(write: Write) -> None:
    with open_checkpoint(write(SMALL)) as checkpoint:
        info = checkpoint.tensors["token_embd.weight"]
        assert not info.data.flags.writeable
        packed = info.packed()
        assert packed.shape == (3, 40)
        assert packed.data_ptr() == info.data.ctypes.data
        out = torch.empty(3, 64)
        info.format.unpack(packed, out)
        assert torch.isfinite(out).all()
        assert checkpoint.tensors["norm"].packed().shape == (1, 20)


def test_writing_to_a_packed_tensor_never_reaches_the_file(write: Write) -> None:
    path = write(SMALL)
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensors["norm"].packed().zero_()
    assert path.read_bytes() == SMALL


def test_tensors_outlive_the_checkpoint(write: Write) -> None:
    checkpoint = open_checkpoint(write(SMALL))
    packed = checkpoint.tensors["token_embd.weight"].packed()
    scores = checkpoint.metadata["tokenizer.ggml.scores"]
    checkpoint.close()
    checkpoint.close()
    assert len(checkpoint.tensors) == 0
    del checkpoint
    gc.collect()
    assert packed.numpy().tobytes() == Q4_1.tobytes()
    assert scores.tolist() == [0.0, -1.5, 2.0, 3.0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_closing_unmaps_the_file_once_no_array_looks_into_it(write: Write) -> None:
    path = write(SMALL)

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    checkpoint = open_checkpoint(path)
    packed = checkpoint.tensors["norm"].packed()
    assert mapped()
    checkpoint.close()
    assert mapped()
    del packed, checkpoint
    gc.collect()
    assert not mapped()
    with open_checkpoint(path):
        assert mapped()
    assert not mapped()


# Broken files: what is refused, what the message must have, and at which byte.

HUGE = 1 << 40


def nested(depth: int) -> bytearray:
    """An array that holds an array that holds an array."""
    level = struct.pack("<IQ", 9, 1)
    return bytearray(struct.pack("<I", 9) + level * depth + struct.pack("<IQ", 0, 0))


def one_tensor(info: bytes, data: bytes = bytes(4096), **counts: Any) -> bytes:
    return raw_gguf([ARCHITECTURE], [info], data, **counts)


def aligned(value: Any) -> bytes:
    return raw_gguf([entry("general.alignment", value), ARCHITECTURE], [tensor_entry("a", [4])])


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", r"is empty \(0 bytes\)"),
    "cut in the magic": (b"GG", "file has 2 bytes, the GGUF header needs 24"),
    "cut in the version": (SMALL[:6], "file has 6 bytes, the GGUF version needs 8"),
    "cut in the counts": (SMALL[:20], "file has 20 bytes, the metadata count needs 24"),
    "cut after the header": (SMALL[:24], "file has 24 bytes, a metadata count of 6 needs"),
    "cut in a key": (
        raw_gguf([string("general.architecture")[:20]]),
        r"file has 44 bytes, metadata key 0 of 1 \(20 bytes\) needs 52.*byte 32",
    ),
    "cut in a value": (
        raw_gguf([ARCHITECTURE[:-2]]),
        r"metadata 'general.architecture' \(5 bytes\) needs 69.*byte 64",
    ),
    "cut in the last tensor": (
        SMALL[:-1],
        f"file has {len(SMALL) - 1} bytes, tensor 'norm' needs {len(SMALL)}",
    ),
    "an HTML page": (
        b"\n<!DOCTYPE html><html><head><title>404</title></head></html>",
        r"no GGUF file but an HTML page.*byte 0",
    ),
    "a zip archive": (b"PK\x03\x04" + bytes(100), "a zip archive, as PyTorch checkpoints are"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    "zeros": (bytes(4096), "zero bytes, as an unfinished download"),
    "safetensors": (struct.pack("<Q", 90) + b'{"a": 1}' + bytes(90), "a safetensors file"),
    "an older format": (b"tjgg" + bytes(100), "a GGJT file"),
    "noise": (b"\x01\x02\x03\x04" * 30, "no format known here .it begins with 01 02 03 04"),
    "byte-swapped": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "byte-swapped magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 0": (raw_gguf(version=0), "GGUF version 0; versions 2 and 3"),
    "version 1": (raw_gguf(version=1), "GGUF version 1; versions 2 and 3 are read .byte 4"),
    "version 99": (raw_gguf(version=99), "GGUF version 99"),
    "tensor count of 2^40": (raw_gguf([ARCHITECTURE], tensor_count=HUGE), "tensor count of 1099"),
    "tensor count of 2^64-1": (raw_gguf(tensor_count=2**64 - 1), "tensor count of 18446744073"),
    "metadata count of 2^40": (raw_gguf(entry_count=HUGE), "metadata count of 10995.*byte 16"),
    "empty key": (raw_gguf([entry("", 1), ARCHITECTURE]), "key 0 of 2 has a length of 0 bytes"),
    "key of 2^40 bytes": (
        raw_gguf([struct.pack("<Q", HUGE) + bytes(64)]),
        "metadata key 0 of 1 has a length of 1099511627776 bytes.*byte 24",
    ),
    "key that is no UTF-8": (
        raw_gguf([ARCHITECTURE, entry(b"caf\xe9", 1)]),
        r"metadata key 1 of 2 is not UTF-8 at its byte 3: b'caf\\xe9'",
    ),
    "value that is no UTF-8": (
        raw_gguf([entry("general.name", b"caf\xe9"), ARCHITECTURE]),
        "'general.name' is not UTF-8",
    ),
    "duplicate key": (
        raw_gguf([ARCHITECTURE, ARCHITECTURE]),
        r"'general.architecture' appears twice .byte 69",
    ),
    "string of 2^40 bytes": (
        raw_gguf([string("k") + struct.pack("<IQ", 8, HUGE) + bytes(64)]),
        r"metadata 'k' \(1099511627776 bytes\) needs",
    ),
    "string of 2^64-1 bytes": (
        raw_gguf([string("k") + struct.pack("<IQ", 8, 2**64 - 1) + bytes(64)]),
        "metadata 'k'",
    ),
    "unknown value type": (
        raw_gguf([string("k") + struct.pack("<I", 13) + bytes(64)]),
        "metadata 'k' has the unknown value type 13 .byte 33",
    ),
    "bool of value 2": (
        raw_gguf([entry("k", bytearray(struct.pack("<IB", 7, 2))), ARCHITECTURE]),
        "metadata 'k' is a bool of value 2",
    ),
    "array of 2^40 numbers": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64)]),
        "metadata 'k' .an array of 1099511627776 uint32. needs",
    ),
    "array of 2^63 numbers": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 12, 1 << 63) + bytes(64)]),
        "metadata 'k' .an array of 9223372036854775808 float64. needs",
    ),
    "array of 2^40 strings": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64)]),
        "metadata 'k' .an array of 1099511627776 strings. needs",
    ),
    "array of 2^40 arrays": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 9, HUGE) + bytes(64)]),
        "metadata 'k' .an array of 1099511627776 arrays. needs",
    ),
    "a long string within an array": (
        raw_gguf(
            [string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") + struct.pack("<Q", HUGE)]
        ),
        r"string 1 of 2 of metadata 'k' \(1099511627776 bytes\) needs",
    ),
    "an array cut between strings": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 8, 3) + string("a" * 15) + bytes(7)]),
        "file has 79 bytes, string 1 of 3 of metadata 'k' needs 80",
    ),
    "array of an unknown type": (
        raw_gguf([string("k") + struct.pack("<IIQ", 9, 99, 1) + bytes(64)]),
        "metadata 'k' is an array of the unknown value type 99",
    ),
    "arrays nested 10,000 deep": (
        raw_gguf([entry("k", nested(10_000)), ARCHITECTURE]),
        "metadata 'k' nests arrays more than 8 deep",
    ),
    "alignment 0": (aligned(0), "general.alignment is 0; a power of two is expected.*byte 53"),
    "alignment 3": (aligned(3), "general.alignment is 3"),
    "alignment 24": (aligned(24), "general.alignment is 24"),
    "alignment 2^30": (aligned(1 << 30), "general.alignment is 1073741824"),
    "alignment as uint64": (aligned(Typed("uint64", 32)), "alignment is uint64, not uint32"),
    "alignment as string": (aligned("32"), "general.alignment is string, not uint32"),
    "no dimensions": (one_tensor(tensor_entry("a", [])), "tensor 'a' has 0 dimensions.*byte"),
    "5 dimensions": (one_tensor(tensor_entry("a", [1] * 5)), "tensor 'a' has 5 dimensions"),
    "2^32-1 dimensions": (
        one_tensor(tensor_entry("a", [4], count=2**32 - 1)),
        "tensor 'a' has 4294967295 dimensions",
    ),
    "a dimension of zero": (
        one_tensor(tensor_entry("a", [4, 0])),
        r"tensor 'a' has a dimension of zero in \[4, 0\].*byte",
    ),
    "a product past 2^64": (
        one_tensor(tensor_entry("a", [1 << 32, 1 << 32, 1 << 32])),
        "tensor 'a' overflows",
    ),
    "a product that wraps to 4": (
        one_tensor(tensor_entry("a", [(1 << 62) + 1, 4])),
        "tensor 'a' overflows",
    ),
    "a dimension of 2^50": (
        one_tensor(tensor_entry("a", [1 << 50])),
        "tensor 'a' needs 4503599627370",
    ),
    "unknown tensor type": (
        one_tensor(tensor_entry("a", [32], 4)),
        "tensor 'a' has the unknown type 4 .byte",
    ),
    "rows that are no whole blocks": (
        one_tensor(tensor_entry("a", [48, 2], 3)),
        "tensor 'a' has rows of 48 weights, no multiple of the 32 in a block of Q4_1",
    ),
    "an unaligned offset": (
        one_tensor(tensor_entry("a", [4], 0, 8)),
        "tensor 'a' has offset 8, no multiple of 32",
    ),
    "an offset past the end": (
        one_tensor(tensor_entry("a", [4], 0, 1 << 40)),
        "file has .* bytes, tensor 'a' needs 1099511",
    ),
    "an offset of nearly 2^64": (
        one_tensor(tensor_entry("a", [4], 0, 2**64 - 32)),
        "tensor 'a' needs 18446744073709",
    ),
    "overlapping tensors": (
        raw_gguf(
            [ARCHITECTURE],
            [tensor_entry("a", [16], 0, 0), tensor_entry("b", [4], 0, 32)],
            bytes(4096),
        ),
        r"tensor 'b' begins at byte 192, inside tensor 'a' \(bytes 160 to 224\)",
    ),
    "duplicate tensors": (
        raw_gguf(
            [ARCHITECTURE],
            [tensor_entry("a", [4], 0, 0), tensor_entry("a", [4], 0, 32)],
            bytes(4096),
        ),
        "tensor 'a' appears twice .byte",
    ),
    "a tensor without a name": (
        one_tensor(tensor_entry("", [4]) + bytes(8)),
        "the name of tensor 0 of 1 has a length of 0 bytes",
    ),
    "a name that is no UTF-8": (
        one_tensor(tensor_entry(b"\xff", [4])),
        "the name of tensor 0 of 1 is not UTF-8",
    ),
    "data that never begins": (
        raw_gguf([ARCHITECTURE], [tensor_entry("a", [4])]),
        "file has 128 bytes, tensor 'a' needs 144",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name_quickly_and_cheaply(write: Write, case: str) -> None:
    content, message = BROKEN[case]
    path = write(content)
    tracemalloc.start()
    try:
        started = time.process_time()
        with pytest.raises(CorruptCheckpointError, match=message) as caught:
            open_checkpoint(path)
        elapsed_s = time.process_time() - started
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert case == "empty file" or "byte " in str(caught.value)
    assert elapsed_s < 0.1
    assert peak_bytes < 10_000_000


def test_arrays_nested_within_reason_open(write: Write) -> None:
    with open_checkpoint(write(raw_gguf([entry("k", nested(7)), ARCHITECTURE]))) as checkpoint:
        value = checkpoint.metadata["k"]
        for _ in range(7):
            (value,) = value
        assert len(value) == 0


def test_a_type_of_ggml_that_cannot_be_unpacked_is_unsupported_by_name(write: Write) -> None:
    content = one_tensor(tensor_entry("a", [256], 15))
    with pytest.raises(UnsupportedModelError, match=r"tensor 'a' is stored as Q8_K.*known are F32"):
        open_checkpoint(write(content))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"<html><body>", "an HTML page"),
        (struct.pack("<Q", 9) + b'{"a": 1}', "a safetensors file"),
        (b'{"weight_map": {}}', "a JSON document"),
        (b"", "empty"),
    ],
)
def test_another_kind_of_file_is_unsupported_and_told_apart(
    write: Write, content: bytes, what: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"is {what}.*supported today: .gguf files"):
        open_checkpoint(write(content, "model.bin"))


def test_a_missing_path_is_named_and_its_cause_kept(tmp_path: Path) -> None:
    path = tmp_path / "nothing.gguf"
    with pytest.raises(ModelLoadError, match=r"nothing\.gguf does not exist") as caught:
        open_checkpoint(path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("name", ["directory.gguf", "directory"])
def test_a_directory_is_named_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ModelLoadError, match=f"{name} is a directory"):
        open_checkpoint(tmp_path / name)


def test_an_unreadable_file_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(SMALL)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # The tests may run as root, whom nothing is unreadable to.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be read: .*Permission denied"):
        open_checkpoint(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("name", ["pipe.gguf", "pipe"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelLoadError, match="is no regular file"):
        open_checkpoint(tmp_path / name)


def test_a_path_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    for name in ("a\0b.gguf", "a\0b"):
        with pytest.raises(ModelLoadError):
            open_checkpoint(tmp_path / name)


def test_a_refused_file_is_not_left_mapped(write: Write) -> None:
    path = write(SMALL[:-1])
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path)
    if sys.platform == "linux":
        assert str(path) not in Path("/proc/self/maps").read_text()


# Split sets.


def part(index: int, parts: int, names: str, total: int, **metadata: Any) -> bytes:
    split = {
        "split.no": Typed("uint16", index),
        "split.count": Typed("uint16", parts),
        "split.tensors.count": Typed("int32", total),
    }
    if index == 0:
        metadata = {"general.architecture": "llama", **metadata}
    values = np.full(5, ord(names[0]) if names else 0, np.float32).tobytes()
    return gguf(metadata | split, {name: ("F32", (5,), values) for name in names})


def split_set(folder: Path, *names: str, total: int | None = None) -> list[Path]:
    paths = []
    for index, own in enumerate(names):
        path = folder / f"m-{index + 1:05d}-of-{len(names):05d}.gguf"
        count = sum(map(len, names)) if total is None else total
        path.write_bytes(part(index, len(names), own, count))
        paths.append(path)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_split_set_opens_from_any_of_its_parts(tmp_path: Path, given: int) -> None:
    paths = split_set(tmp_path, "ab", "cd", "e")
    with open_checkpoint(paths[given]) as checkpoint:
        assert checkpoint.architecture == "llama"
        assert checkpoint.path == paths[given]
        assert "".join(checkpoint.tensors) == "abcde"
        assert checkpoint.tensors["d"].data.view(np.float32).tolist() == [ord("c")] * 5
        assert checkpoint.tensors["e"].source.startswith("m-00003-of-00003.gguf, byte ")
        assert checkpoint.nbytes == sum(path.stat().st_size for path in paths)


def test_a_first_part_without_tensors_is_fine(tmp_path: Path) -> None:
    paths = split_set(tmp_path, "", "ab")
    with open_checkpoint(paths[0]) as checkpoint:
        assert "".join(checkpoint.tensors) == "ab"


@pytest.mark.parametrize(("given", "missing"), [(0, 1), (0, 2), (1, 0), (2, 1)])
def test_a_missing_part_is_named(tmp_path: Path, given: int, missing: int) -> None:
    paths = split_set(tmp_path, "ab", "cd", "e")
    paths[missing].unlink()
    with pytest.raises(ModelLoadError, match=f"{paths[missing].name} is missing") as caught:
        open_checkpoint(paths[given])
    assert paths[given].name in str(caught.value)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = split_set(tmp_path, "ab", "cd", "e")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"m-00002-of-00003\.gguf: file has"):
        open_checkpoint(paths[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (part(1, 4, "cd", 5), r"m-00002-of-00003\.gguf says it is part 2 of 4"),
        (part(2, 3, "cd", 5), r"m-00002-of-00003\.gguf says it is part 3 of 3"),
        (part(1, 3, "bd", 5), r"'b' is both in .*m-00001-of-00003\.gguf and in .*m-00002-of-00003"),
        (part(1, 3, "cdx", 5), r"m-00001-of-00003\.gguf is of a set of 5 tensors.*have 6"),
        (part(1, 3, "cd", 9), r"m-00002-of-00003\.gguf is of a set of 9 tensors.*have 5"),
        (gguf({}, {}), r"m-00002-of-00003\.gguf says it is part 1 of 1"),
    ],
    ids=["other count", "other number", "same tensor", "more tensors", "other total", "whole"],
)
def test_parts_of_two_sets_are_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    paths = split_set(tmp_path, "ab", "cd", "e")
    paths[1].write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=message):
        open_checkpoint(paths[0])


@pytest.mark.parametrize("name", ["model.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf"])
def test_a_part_under_another_name_is_refused_with_the_name_it_needs(
    tmp_path: Path, name: str
) -> None:
    path = split_set(tmp_path, "ab", "cd", "e")[0]
    path = path.rename(tmp_path / name)
    with pytest.raises(CorruptCheckpointError, match=r"part 1 of 3.*NAME-00001-of-00003\.gguf"):
        open_checkpoint(path)


@pytest.mark.parametrize(("number", "count"), [(3, 3), (Typed("int32", -1), 3), ("0", 3), (0, "x")])
def test_split_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, number: Any, count: Any
) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    metadata = {"general.architecture": "x", "split.no": number, "split.count": count}
    path.write_bytes(gguf(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"split\.no .* of split\.count"):
        open_checkpoint(path)


# Anything at all.


@settings(
    max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.just(len(SMALL)) | st.integers(0, len(SMALL)),
    changes=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_file_opens_soundly_or_is_refused(
    tmp_path: Path, length: int, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(SMALL)
    for at, byte in changes:
        content[at] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:length])
    try:
        checkpoint = open_checkpoint(path)
    except (CorruptCheckpointError, UnsupportedModelError) as error:
        assert str(path) in str(error)
        return
    with checkpoint:
        for key in checkpoint.metadata:
            assert checkpoint.metadata[key] is not None
        for info in checkpoint.tensors.values():
            assert len(info.data) == info.nbytes
            out = torch.empty(info.rows, info.columns)
            info.format.unpack(info.packed(), out)


def test_every_truncation_of_a_small_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(len(SMALL)):
        path.write_bytes(SMALL[:length])
        with pytest.raises(CorruptCheckpointError):
            open_checkpoint(path)


# Real files.

MEASURE = """
import sys, types
import numpy, mmap
package = types.ModuleType("asyncllm")  # the rooms above are not measured
package.__path__ = [sys.argv[2]]
sys.modules["asyncllm"] = package
from asyncllm.checkpoint.checkpoint import open_checkpoint
import time

def private_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before, started = private_kib(), time.process_time()
checkpoint = open_checkpoint(sys.argv[1])
elapsed_s, grown_kib = time.process_time() - started, private_kib() - before
assert checkpoint.architecture == "gemma3" and len(checkpoint.tensors) == 236
assert elapsed_s < 0.5, f"{elapsed_s} s"
assert grown_kib < 50 * 1024, f"{grown_kib} KiB"
assert len(checkpoint.string_array("tokenizer.ggml.tokens")) == 262144
"""


@pytest.mark.real_model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_real_file_opens_in_half_a_second_and_50_mb(gemma_path: Path) -> None:
    import asyncllm

    package = asyncllm.__path__[0]
    command = [sys.executable, "-c", MEASURE, str(gemma_path), str(package)]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.real_model
def test_a_real_file_has_its_tensors_where_the_gguf_package_finds_them(smollm2_path: Path) -> None:
    from gguf import GGUFReader

    theirs = {tensor.name: tensor for tensor in GGUFReader(smollm2_path).tensors}
    with open_checkpoint(smollm2_path) as checkpoint:
        assert set(checkpoint.tensors) == set(theirs)
        for name, info in checkpoint.tensors.items():
            tensor = theirs[name]
            assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
            assert info.format.type_id == tensor.tensor_type
            assert info.source.endswith(f"byte {tensor.data_offset}")
            assert info.nbytes == tensor.n_bytes


def test_a_map_larger_than_the_memory_is_no_promise_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    try:
        mapped = map_file(path)
    except ModelLoadError as error:
        pytest.skip(f"this machine maps no 4 TiB: {error}")
    assert isinstance(mapped, mmap.mmap)
    mapped.close()


def test_a_file_object_closes_twice(write: Write) -> None:
    file = GGUFFile(write(SMALL))
    assert file.version == 3
    assert file.tensors["norm"].format.name == "F32"
    file.close()
    file.close()


def test_the_helper_writes_what_the_gguf_package_reads(write: Write) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(write(SMALL))
    assert [tensor.name for tensor in reader.tensors] == ["token_embd.weight", "norm"]
    assert value_bytes(7) == struct.pack("<II", 4, 7)
