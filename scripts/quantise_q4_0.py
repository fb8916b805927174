"""Write a copy of a GGUF file with its matrices in Q4_0, the format llama.cpp repacks for CPUs.

Usage: python scripts/quantise_q4_0.py MODEL.gguf TARGET.gguf [--head-q8_0]

The weights of matrices are unpacked and quantised again, so that the copy is a little worse than
what it was made of: it serves to compare speeds. Vectors, float32 matrices, and the matrices of the
embedding and of the output stay as they are, the latter two in Q8_0 with `--head-q8_0`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gguf

HEADS = ("token_embd.weight", "output.weight")
WRITTEN_ELSEWHERE = ("general.architecture", "general.file_type", "general.quantization_version")


def new_type(tensor: gguf.ReaderTensor, head_q8_0: bool) -> gguf.GGMLQuantizationType:
    """The format a tensor gets in the copy."""
    import gguf

    types = gguf.GGMLQuantizationType
    wanted = types.Q4_0
    if tensor.name in HEADS:
        wanted = types.Q8_0 if head_q8_0 else tensor.tensor_type
    is_matrix = len(tensor.shape) >= 2 and tensor.shape[1] > 1
    # float32 is what is meant to be exact, such as the choice of experts.
    keeps = not is_matrix or tensor.tensor_type == types.F32 or tensor.shape[0] % 32
    return tensor.tensor_type if keeps else wanted


def write_q4_0(model: Path, target: Path, *, head_q8_0: bool = False) -> Counter[str]:
    """Write the copy; returns how many tensors have each format in it.

    Raises:
        ValueError: the file is a part of a split set.
    """
    import gguf

    source = gguf.GGUFReader(model)
    parts = source.fields.get("split.count")
    if parts is not None and parts.contents() > 1:
        raise ValueError(f"{model} is one of {parts.contents()} parts; join them first")
    # The temporary file spares the memory of a whole copy.
    writer = gguf.GGUFWriter(
        target, source.fields["general.architecture"].contents(), use_temp_file=True
    )
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in WRITTEN_ELSEWHERE:
            kind, *inner = field.types
            writer.add_key_value(
                name, field.contents(), kind, sub_type=inner[-1] if inner else None
            )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    formats: Counter[str] = Counter()
    for tensor in source.tensors:
        wanted = new_type(tensor, head_q8_0)
        data = tensor.data
        if wanted != tensor.tensor_type:
            plain = gguf.quants.dequantize(data, tensor.tensor_type)
            data = gguf.quants.quantize(plain, wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
        formats[wanted.name] += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return formats


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("target", type=Path, help="the copy; must not exist")
    parser.add_argument("--head-q8_0", action="store_true", help="embedding and output in Q8_0")
    options = parser.parse_args()
    if options.target.exists():
        print(f"{options.target} exists already", file=sys.stderr)
        return 1
    try:
        formats = write_q4_0(options.model, options.target, head_q8_0=options.head_q8_0)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{name} ({count})" for name, count in formats.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
