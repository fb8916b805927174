"""Write what a model answers on the CPU: tokens, and how near the second choice was to each.

Usage: python scripts/cpu_tokens.py MODEL.gguf OUT.json [THREADS]

Greedy answers to a few prompts, one after the other. Another device is held against them: where its
tokens part from these, the gap says whether both were about as likely.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine

TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a shepherd who",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8,",
    "Water boils at",
    "A list of colours: red,",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "In the beginning there was a small village at the foot of a mountain. The people who lived "
    "there were farmers and shepherds, and every evening they met at the well to talk.",
    "To make bread you need flour,",
    "SELECT name FROM customers WHERE",
    "The difference between a cat and a dog is",
    "Monday, Tuesday,",
    "import asyncio\n\nasync def main():\n",
    "Photosynthesis is the process by which",
)


async def answers(model: Path, threads: int | None) -> dict[str, Any]:
    """What serves, and of each prompt its text and ids, tokens, gaps of the two best logits."""
    found: list[dict[str, Any]] = []
    options: dict[str, Any] = {"device": "cpu", "threads": threads, "context_length": 256}
    async with AsyncEngine.load(model, **options) as engine:
        for prompt in PROMPTS:
            ids = engine.tokenizer.encode(prompt)
            done = await engine.generate(
                ids,
                max_tokens=TOKENS,
                temperature=0,
                repetition_penalty=1.0,
                ignore_eos=True,
                logprobs=2,
            )
            pairs = [each.top for each in done.logprobs or ()]
            # Log-probabilities are logits less what is the same for all tokens.
            gaps = [round(first.logprob - second.logprob, 4) for first, second in pairs]
            tokens = list(done.token_ids)
            found.append({"prompt": prompt, "ids": ids, "tokens": tokens, "gaps": gaps})
        backend = engine.info.backend
    return {"backend": backend, "answers": found}


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    model, target = Path(arguments[0]), Path(arguments[1])
    threads = int(arguments[2]) if len(arguments) > 2 else None
    found = asyncio.run(answers(model, threads))
    lines = ",\n".join(json.dumps(answer) for answer in found["answers"])
    about = {"model": model.name, "bytes": model.stat().st_size, "backend": found["backend"]}
    target.write_text(f'{{"about": {json.dumps(about)}, "answers": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
