"""Compare greedy tokens of the engine's fast path with the plain float32 forward pass.

Usage: python scripts/compare_plain.py MODEL.gguf [--prompts 32] [--tokens 64] [--threads 1]

The engine generates; then the plain forward goes over prompt and output, and every token that is
not the most likely one there is listed with the distance of the two logits. The first of an output
is where the plain path, left alone, would have gone another way.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asyncllm import Tokenizer
from scripts.compare_llamacpp import (
    LENGTHS,
    Comparison,
    PlainForward,
    ask_engine,
    judge,
    prompts,
)


def compare(model: Path, count: int, tokens: int, threads: int) -> list[Comparison]:
    """One comparison a prompt; `forced` has the places where the plain forward would differ."""
    from asyncllm.runner.threads import use_threads

    tokenizer = Tokenizer.from_file(model)
    prompt_ids = [tokenizer.encode(text) for text in prompts(tokenizer, range(1, count + 1))]
    context = -(-max(len(ids) + tokens for ids in prompt_ids) // 256) * 256
    outputs = asyncio.run(ask_engine(model, prompt_ids, tokens, context, threads))

    def judge_all() -> list[Comparison]:
        use_threads(threads)
        with closing(PlainForward(model, context)) as forward:
            every = zip(prompt_ids, outputs, strict=True)
            return [judge(forward, tokenizer, ids, output, output) for ids, output in every]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(judge_all).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", type=int, default=len(LENGTHS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    found = compare(options.model, options.prompts, options.tokens, options.threads)
    for number, each in enumerate(found, 1):
        places = ", ".join(f"{choice.at}: {choice.gap:.3f}" for choice in each.forced)
        print(f"{number:3} {each.prompt_tokens:5} tokens  {places or 'equal'}")
    firsts = [each.forced[0].gap for each in found if each.forced]
    total = sum(len(each.forced) for each in found)
    print(
        f"{len(found) - len(firsts)} of {len(found)} prompts equal over {options.tokens} tokens; "
        f"largest gap at a first difference {max(firsts, default=0.0):.3f}; "
        f"{total} of {len(found) * options.tokens} tokens differ"
    )


if __name__ == "__main__":
    main()
