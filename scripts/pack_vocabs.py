"""Pack vocabulary-only GGUF files and llama.cpp's test cases for them into small test data.

    python -m scripts.pack_vocabs FOLDER

reads `FOLDER/ggml-vocab-NAME.gguf`, `.gguf.inp` (texts) and `.gguf.out` (their ids, no special
tokens added), as llama.cpp keeps them in `models/`, and writes `tests/data/vocabs/NAME.json.xz`.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from asyncllm.checkpoint.checkpoint import open_checkpoint

TARGET = Path(__file__).parent.parent / "tests" / "data" / "vocabs"
SEPARATOR = "\n__ggml_vocab_test__\n"
KEPT = ("general.architecture", "general.name", "tokenizer.")


def pack(path: Path) -> dict[str, Any]:
    """The tokenizer's metadata as plain values, and the cases as pairs of text and ids."""
    with open_checkpoint(path) as checkpoint:
        metadata = {
            key: value.tolist() if hasattr(value, "tolist") else value
            for key, value in checkpoint.metadata.items()
            if key.startswith(KEPT)
        }
    # The newlines within the texts are part of the cases.
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().split("\n")
    cases = [
        (text, [int(word) for word in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]
    return {"metadata": metadata, "cases": cases}


def main() -> None:
    folder = Path(sys.argv[1])
    TARGET.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        target = TARGET / f"{path.stem.removeprefix('ggml-vocab-')}.json.xz"
        text = json.dumps(pack(path), ensure_ascii=False, separators=(",", ":"))
        target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
