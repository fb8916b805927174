"""Do greedy tokens equal llama.cpp's on the same file?

Usage: python -m scripts.compare_llamacpp MODEL.gguf [--prompts N] [--tokens N] [--threads N]

llama.cpp runs through `xllamacpp` with float32 K/V and without flash attention. It quantises
activations to 8 bits in its products, which we do not, so two candidates that are nearly as likely
may change places. At the first place where a prompt parts, the gap between the logits that both
candidates have here is printed; it must be within 0.5. Ends with status 1 if one is not, or if a
prompt is encoded differently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine

GREATEST_GAP = 0.5

PROSE = (
    "The harbour was quiet when the first boats came in. Men in heavy coats threw ropes to boys "
    "who tied them without looking, and the smell of tar and fish rose with the sun. A woman "
    "counted crates and wrote the numbers into a small black book. Nobody spoke much before the "
    "bell had rung. Behind the warehouses the road climbed to the old town, where bakers had been "
    "at work since midnight and the first carts were already rolling over the stones. "
)
CODE = '''class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

'''
LIST = (
    "Things to pack:\n- two shirts\n- a torch\n- matches, dry\n- the map of the northern trails\n- "
)
NUMBERS = "1 1 2 3 5 8 13 21 34 55 89 144\n2 4 8 16 32 64 128 256 512\n1 4 9 16 25 36 49 64 81\n"
LANGUAGES = (
    "Der Zug nach Bern fährt um sieben Uhr ab. Le train pour Genève part à huit heures. "
    "El tren a Madrid sale a las nueve. 東京行きの電車は十時に出ます。"
    "Поезд в Москву уходит в полдень. "
)
QUESTIONS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
    "To make a cup of tea, first",
    "In 1969, the first",
    "A triangle has three sides and",
    "The opposite of hot is",
    "My favourite season is",
]


def prompts(count: int) -> list[str]:
    """Varied texts, from a few words to some 900 tokens."""
    made: list[str] = []
    materials = [PROSE, CODE, LIST, NUMBERS, LANGUAGES]
    for number in range(count):
        question = QUESTIONS[number // 4 % len(QUESTIONS)]
        if number % 4 == 0:
            made.append(question)
            continue
        material = materials[number % len(materials)]
        characters = (60, 240, 700, 1500, 2600, 3400)[number % 6]
        if material is NUMBERS or material is LANGUAGES:  # a token has fewer characters there
            characters //= 4
        text = (material * (characters // len(material) + 1))[:characters]
        made.append(text if number % 3 else f"{text}\n{question}")
    return made


@contextlib.contextmanager
def llama_cpp(model: Path, threads: int) -> Iterator[str]:
    """Serve the model with llama.cpp; gives the address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 2048
    params.n_parallel = 1
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    yield server.listening_address
    del server


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        address + path, data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


@dataclass(frozen=True)
class Peer:
    """What llama.cpp made of one prompt."""

    prompt_ids: list[int]
    tokens: list[int]


def peer_answers(model: Path, texts: list[str], tokens: int, threads: int) -> list[Peer]:
    answers = []
    with llama_cpp(model, threads) as address:
        for text in texts:
            encoded = ask(address, "/tokenize", {"content": text, "add_special": True})["tokens"]
            body = {
                "prompt": encoded,
                "n_predict": tokens,
                "temperature": 0.0,
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
                "ignore_eos": True,
            }
            answers.append(Peer(encoded, ask(address, "/completion", body)["tokens"]))
    return answers


@dataclass(frozen=True)
class Comparison:
    """How far the tokens of one prompt agree; `gap` is of the logits where they part."""

    prompt_tokens: int
    same_prompt: bool
    compared: int
    equal: int
    ours: str = ""
    theirs: str = ""
    gap: float = 0.0

    @property
    def good(self) -> bool:
        return self.same_prompt and self.gap <= GREATEST_GAP


async def compare(engine: AsyncEngine, text: str, peer: Peer) -> Comparison:
    """Generate as many tokens as llama.cpp did and look where they part."""
    size = engine.tokenizer.vocab_size
    # llama.cpp's `ignore_eos` keeps all end tokens from being chosen, which a bias does here.
    never = dict.fromkeys(engine.tokenizer.eog_ids, float("-inf"))
    count = len(peer.tokens)
    same = engine.tokenizer.encode(text) == peer.prompt_ids
    done = await engine.generate(
        peer.prompt_ids, max_tokens=count, temperature=0, ignore_eos=True, logit_bias=never
    )
    pairs = enumerate(zip(done.token_ids, peer.tokens, strict=True))
    parted = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
    if parted is None:
        return Comparison(len(peer.prompt_ids), same, count, count)
    known = [*peer.prompt_ids, *peer.tokens[:parted]]
    last = await engine.generate(
        known, max_tokens=1, temperature=0, ignore_eos=True, logprobs=size, prefix_cache=False
    )
    if last.logprobs is None:
        raise RuntimeError("log-probabilities were asked for and did not come")
    logits = {entry.token_id: entry.logprob for entry in last.logprobs[0].top}
    ours, theirs = done.token_ids[parted], peer.tokens[parted]
    name = engine.tokenizer.decode
    return Comparison(
        len(peer.prompt_ids),
        same,
        count,
        parted,
        repr(name([ours])),
        repr(name([theirs])),
        logits[ours] - logits[theirs],
    )


async def compare_all(model: Path, texts: list[str], tokens: int, threads: int) -> list[Comparison]:
    """Both engines over all texts, one after the other."""
    peers = await asyncio.to_thread(peer_answers, model, texts, tokens, threads)
    async with AsyncEngine.load(model, context_length=2048, threads=threads) as engine:
        pairs = zip(texts, peers, strict=True)
        return await asyncio.gather(*(compare(engine, text, peer) for text, peer in pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    found = asyncio.run(
        compare_all(
            arguments.model, prompts(arguments.prompts), arguments.tokens, arguments.threads
        )
    )
    print("prompt  tokens  equal     gap  ours / llama.cpp's")
    for number, row in enumerate(found):
        names = f"{row.ours} / {row.theirs}" if row.ours else ""
        gap = f"{row.gap:7.3f}" if row.ours else " " * 7
        note = "" if row.same_prompt else "  ENCODED DIFFERENTLY"
        print(
            f"{number:6}  {row.prompt_tokens:6}  {row.equal:2} of {row.compared:2} {gap} "
            f"{names}{note}"
        )
    whole = sum(row.equal == row.compared for row in found)
    good = sum(row.good for row in found)
    greatest = max(row.gap for row in found)
    print(
        f"{whole} of {len(found)} prompts equal throughout; greatest gap {greatest:.3f}; "
        f"{good} within {GREATEST_GAP}"
    )
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
