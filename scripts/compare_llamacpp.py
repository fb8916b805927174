"""Compare greedy tokens with llama.cpp's on the same GGUF file.

Usage: python scripts/compare_llamacpp.py MODEL.gguf [--prompts 32] [--tokens 64] [--widened]
       [--threads 1]

Both sides get the same token ids, after it was checked that both make the same ids of the text, and
neither may choose an end-of-generation token. llama.cpp rounds activations to 8 bits where weights
are packed, so that it may decide a near-tie the other way. At the first token that differs the
plain float32 forward pass gives the logits of both candidates; a gap of up to `ALLOWED_GAP` is a
near-tie, and what follows is not compared.

The same pass also goes over all of llama.cpp's tokens, and each one that is not the most likely
there is listed with its gap. These gaps do not count: where an output has gone astray llama.cpp's
rounding can weigh far more, and its own prefill and decode may not agree. With `--widened` it gets
a float32 copy of the same weights, with which it does not round, and then they count.

The exit code is 1 where a gap is larger, where the ids of a text differ, or where the two sides
know different end-of-generation tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

if __package__ in (None, ""):  # run as a file: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asyncllm import AsyncEngine, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

ALLOWED_GAP: Final = 0.5
CHUNK: Final = 512  # tokens of a pass of the plain forward
LOGITS_ROWS: Final = 32  # rows of logits it makes at a time
BLOCK_TOKENS: Final = 16

# Tokens of the prompts, as near as cutting texts comes to them.
LENGTHS: Final = (
    *(24, 60, 5, 110, 12, 40, 900, 7, 150, 300, 16, 500, 80, 9, 220, 33),
    *(700, 6, 130, 20, 400, 50, 10, 260, 95, 600, 28, 180, 14, 800, 70, 350),
)

# Each prompt begins in another piece, or at another of its lines, and goes on through those after.
PIECES: Final = (
    """The ferry left at six, while the harbour was still dark and the gulls slept on the roofs.
Marta had bought her ticket the evening before, together with a paper bag of plums for the way.
Nobody on the quay knew her name, and that suited her; she had not come back to be remembered.
When the engine began to turn, an old man beside her took off his hat and said, quite calmly, that
he had made this crossing four hundred times and had been seasick on every one of them.""",
    '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


assert merge_intervals([(1, 3), (2, 6), (8, 10)]) == [(1, 6), (8, 10)]''',
    """Things to pack for three days in the mountains:
- two pairs of woollen socks, and one pair too many
- a map on paper (the telephone will be empty by noon)
- matches, candle ends, a knife that is actually sharp
- bread, hard cheese, dried apricots, 200 g of chocolate
- for the hut: slippers, earplugs, small change
1. Check the weather twice. 2. Tell somebody the way. 3. Turn back in time.""",
    """1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233
2024-02-29,18.5,1013,0.0
2024-03-01,17.25,1009,2.4
2024-03-02,-3.75,998,11.9
3.14159 26535 89793; 2^16 = 65536; 7 * 8 = 56; 1000000 / 37 = 27027.027
0x1F 0b1011 1e-9 6.022e23 192.168.0.17 +49 (0)30 1234-5678""",
    """Der Bäcker öffnet früh um fünf, und eine Stunde später riecht die ganze Straße nach Brot.
Im Winter stehen die Leute bis zur Ecke, mit Mützen und müden Gesichtern, und niemand drängelt.
Außer sonntags gibt es Mohnbrötchen; wer zu spät kommt, muss sich mit Knäckebrot begnügen.""",
    """La bibliothèque du village ne possède que huit cents livres, mais chacun a été lu et relu.
L'été dernier, un garçon de dix ans y a trouvé une lettre glissée entre deux pages d'un atlas.
Elle commençait ainsi : « Cher ami, si tu lis ces lignes, c'est que l'hiver est enfin passé. »""",
    """SELECT c.name, COUNT(*) AS orders, SUM(o.total) AS spent
FROM customers AS c JOIN orders AS o ON o.customer_id = c.id
WHERE o.placed_at >= '2023-01-01' AND c.country IN ('PT', 'IS', 'NZ')
GROUP BY c.name HAVING SUM(o.total) > 99.90 ORDER BY spent DESC LIMIT 10;
{"id": 17, "tags": ["blue", "large"], "size": {"w": 120, "h": 45.5}, "sold": false, "note": []}""",
    """Старый часовщик жил на третьем этаже, прямо над аптекой, и окна его никогда не гасли.
Он чинил всё: будильники, карманные часы, даже музыкальную шкатулку, которая играла только зимой.
今日は朝から雨が降っていたので、駅まで歩かずにバスで行きました。窓の外の田んぼがとても静かでした。
图书馆旁边有一家小茶馆,老板每天下午都在门口下棋,输了就请客人喝茶。""",
    """Question: Why does ice float on water?
Answer: Because water expands when it freezes, so that ice is less dense than the liquid below it.
Question: How many minutes are there in a day?
Answer: There are 24 hours of 60 minutes each, which makes 1440 minutes.
Question: What do bees make besides honey?
Answer:""",
    """# Release notes

## Fixed

* Closing a window **twice** no longer ends the program (`close()` is idempotent now).
* The table of contents lists [chapters](#chapters) of more than one word.

| size | seconds | ratio |
|-----:|--------:|------:|
| 10   | 0.42    | 1.0   |
| 1000 | 39.8    | 94.8  |""",
    """El mercado abre los martes y los viernes; ¿quién no conoce el puesto de doña Inés?
Vende tomates, ajos y unas naranjas pequeñas que nadie más consigue, ¡ni siquiera en la capital!
في الصباح الباكر يفتح الصياد شباكه على الرمل ويعدّ ما بقي من الليل. שלום לכולם, הגענו בזמן.
नदी के किनारे एक पुराना पेड़ था। 😀🚲 naïve café — “quotes”, ½ cup, 25 °C … x² ≠ √y""",
    """#include <stdio.h>

/* Counts the bits of n that are set. */
static int popcount(unsigned n) {
\tint count = 0;
\tfor (; n; n &= n - 1) count++;
\treturn count;
}

int main(void) { printf("%d\\n", popcount(0xF0F0u)); return 0; }""",
)

Post = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """Where two tokens were candidates for one place.

    Attributes:
        at: output position, from 0.
        ours: our token.
        theirs: llama.cpp's token.
        gap: distance of their logits in the plain float32 forward after the same tokens.
    """

    at: int
    ours: int
    theirs: int
    gap: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt.

    Attributes:
        prompt_tokens: its length.
        equal: output tokens that are equal before the first that differs.
        parting: the first that differs in what both generated.
        forced: places where the plain forward over llama.cpp's tokens would choose otherwise.
    """

    prompt_tokens: int
    equal: int
    parting: Choice | None
    forced: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All prompts, and what is wrong, in words; nothing wrong is an empty tuple."""

    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]


def prompts(tokenizer: Tokenizer, numbers: Iterable[int]) -> list[str]:
    """Texts of about `LENGTHS` tokens, by their numbers from 1."""
    texts = []
    for number in numbers:
        turn, first = divmod(number - 1, len(PIECES))
        begun = "\n".join(PIECES[first].split("\n")[turn:])
        text = "\n\n".join([begun, *PIECES[first + 1 :], *PIECES[:first]])
        cut = tokenizer.decode(tokenizer.encode(text)[: LENGTHS[number - 1]])
        texts.append(cut.rstrip("\ufffd"))
    return texts


@contextmanager
def llamacpp(model: Path, context: int, threads: int) -> Iterator[Post]:
    """A llama.cpp server in this process; gives a function that posts JSON to a path of it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel = 1
    params.n_ctx = context
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = params.n_ctx_checkpoints = params.verbosity = 0
    params.warmup = False
    server = xllamacpp.Server(params)
    try:
        yield partial(_post, server.listening_address.removeprefix("http://"))
    finally:
        del server  # which ends its threads


def _post(address: str, path: str, body: dict[str, Any]) -> Any:
    with closing(http.client.HTTPConnection(address, timeout=600)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"llama.cpp answers {response.status} to {path}: {answer}")
    return answer


def ask_llamacpp(post: Post, ids: Sequence[int], tokens: int) -> tuple[list[int], set[int]]:
    """Greedy output of llama.cpp, and the tokens it was kept from: its ends of generation.

    Raises:
        RuntimeError: it answers with an error, or with another number of tokens.
    """
    answer = post(
        "/completion",
        {
            "prompt": list(ids),
            "n_predict": tokens,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "repeat_penalty": 1.0,
            "cache_prompt": False,
            "ignore_eos": True,
            "return_tokens": True,
        },
    )
    output, settings = answer["tokens"], answer["generation_settings"]
    if len(output) != tokens:
        raise RuntimeError(f"{len(output)} tokens came from llama.cpp; {tokens} were asked for")
    return output, {entry["token"] for entry in settings["logit_bias"]}


async def ask_engine(
    model: Path, prompt_ids: Sequence[Sequence[int]], tokens: int, context: int, threads: int
) -> list[tuple[int, ...]]:
    """Greedy output of ours for all the prompts, as many at a time as the engine runs."""
    async with AsyncEngine.load(model, context_length=context, threads=threads) as engine:
        generations = [
            engine.generate(
                ids,
                max_tokens=tokens,
                min_tokens=tokens,  # no end of generation before
                ignore_eos=True,
                temperature=0,
                repetition_penalty=1,
            )
            for ids in prompt_ids
        ]
        done = await asyncio.gather(*(generation.result() for generation in generations))
    return [completion.token_ids for completion in done]


def write_widened(model: Path, target: Path) -> None:
    """Write a copy of a GGUF file whose weights are all float32."""
    import gguf

    source = gguf.GGUFReader(model)
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in source.fields.items():
        # The writer adds these itself, and the file type is no longer true.
        if not name.startswith("GGUF.") and name not in (
            "general.architecture",
            "general.file_type",
        ):
            kind, *inner = field.types
            items = inner[-1] if inner else None
            writer.add_key_value(name, field.contents(), kind, sub_type=items)
    for tensor in source.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class PlainForward:
    """The plain float32 forward pass, without scheduler, cache or sampling.

    Args:
        model: path of the checkpoint.
        context: tokens of a sequence at most.
    """

    def __init__(self, model: Path, context: int) -> None:
        import torch

        from asyncllm.checkpoint.checkpoint import open_checkpoint
        from asyncllm.kv.pool import KvPool, layer_groups
        from asyncllm.model.causal_lm import CausalLM
        from asyncllm.model.config import ModelConfig
        from asyncllm.model.program import PlainProgram

        with torch.inference_mode(), open_checkpoint(model) as checkpoint:
            config = ModelConfig.from_checkpoint(checkpoint)
            bound = CausalLM.bind(checkpoint, config, context_length=context)
            groups = layer_groups(
                config,
                block_tokens=BLOCK_TOKENS,
                chunk=CHUNK,
                max_seqs=1,
                context_length=context,
                kv_bytes=1 << 50,  # no bound: one sequence is all there is
                dtype=torch.float32,
            )
            self.pool = KvPool(
                groups,
                block_tokens=BLOCK_TOKENS,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype=torch.float32,
            )
            self.program = PlainProgram(bound, self.pool, max_rows=CHUNK, max_logits=LOGITS_ROWS)

    def close(self) -> None:
        self.pool.close()

    def logits(self, ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Logits after each token from position `first` on: float32 [vocab_size], valid until the
        next is asked for.
        """
        import torch

        from asyncllm.model.program import Chunk

        blocks = -(-len(ids) // BLOCK_TOKENS)
        tables = [range(min(blocks, group.capacity)) for group in self.pool.groups]
        for offset in range(0, len(ids), CHUNK):
            part = ids[offset : offset + CHUNK]
            with torch.inference_mode():
                self.program.forward([Chunk(part, offset, tables)])
            for start in range(max(0, first - offset), len(part), LOGITS_ROWS):
                with torch.inference_mode():
                    rows = range(start, min(start + LOGITS_ROWS, len(part)))
                    found = self.program.logits(rows)
                yield from found


def judge(
    forward: PlainForward,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
) -> Comparison:
    """Compare two outputs for one prompt, and every token of llama.cpp with the plain forward."""
    import torch

    parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    parting, forced = None, []
    ends = list(tokenizer.eog_ids)
    for at, row in enumerate(forward.logits([*prompt, *theirs[:-1]], len(prompt) - 1)):
        with torch.inference_mode():
            allowed = row[: tokenizer.vocab_size].clone()
            allowed[ends] = -torch.inf
            likeliest = int(allowed.argmax())
            scores = allowed.tolist() if at == parted or likeliest != theirs[at] else []
        if at == parted:
            gap = abs(scores[ours[at]] - scores[theirs[at]])
            parting = Choice(at, ours[at], theirs[at], gap)
        if likeliest != theirs[at]:
            gap = scores[likeliest] - scores[theirs[at]]
            forced.append(Choice(at, likeliest, theirs[at], gap))
    equal = len(theirs) if parted is None else parted
    return Comparison(len(prompt), equal, parting, tuple(forced))


def compare(
    model: Path,
    numbers: Sequence[int],
    tokens: int,
    *,
    widened: bool = False,
    threads: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compare some prompts over `tokens` output tokens each.

    Args:
        model: the file our engine loads.
        numbers: of the prompts, from 1 to as many as `LENGTHS`.
        tokens: output tokens of each.
        widened: give llama.cpp a float32 copy of the weights, made for this comparison.
        threads: of llama.cpp and of torch.
        progress: told what is being done.
    """
    from asyncllm.runner.threads import use_threads

    started = time.perf_counter()

    def say(what: str) -> None:
        progress(f"{time.perf_counter() - started:7.1f} s  {what}")

    tokenizer = Tokenizer.from_file(model)
    texts = prompts(tokenizer, numbers)
    prompt_ids = [tokenizer.encode(text) for text in texts]
    context = -(-max(len(ids) + tokens for ids in prompt_ids) // 256) * 256
    problems: list[str] = []

    theirs: list[list[int]] = []
    with ExitStack() as opened:
        reference = model
        if widened:
            say("a float32 copy of the weights is written")
            folder = Path(opened.enter_context(TemporaryDirectory()))
            reference = folder / "widened.gguf"
            write_widened(model, reference)
        say(f"llama.cpp generates {len(numbers)} x {tokens} tokens")
        post = opened.enter_context(llamacpp(reference, context, threads))
        for number, text, ids in zip(numbers, texts, prompt_ids, strict=True):
            expected = post("/tokenize", {"content": text, "add_special": True})["tokens"]
            if ids != expected:
                problems.append(f"prompt {number}: our ids {ids}, llama.cpp's {expected}")
            output, banned = ask_llamacpp(post, ids, tokens)
            theirs.append(output)
    if banned != tokenizer.eog_ids:
        problems.append(
            f"ends of generation: ours {sorted(tokenizer.eog_ids)}, llama.cpp's {sorted(banned)}"
        )

    say("our engine generates the same")
    ours = asyncio.run(ask_engine(model, prompt_ids, tokens, context, threads))
    say("the plain forward judges llama.cpp's tokens")

    def judge_all() -> tuple[Comparison, ...]:
        # On a thread of its own, where the number of torch's threads is nobody else's.
        use_threads(threads)
        with closing(PlainForward(model, context)) as forward:
            every = zip(prompt_ids, ours, theirs, strict=True)
            return tuple(judge(forward, tokenizer, *each) for each in every)

    with ThreadPoolExecutor(1) as thread:
        comparisons = thread.submit(judge_all).result()
    say("done")
    for number, found in zip(numbers, comparisons, strict=True):
        counted = [] if found.parting is None else [found.parting]
        if widened:  # no rounding explains it
            counted += found.forced
        problems += [
            f"prompt {number}: token {choice.at} has a gap of {choice.gap:.4f}"
            for choice in dict.fromkeys(counted)
            if not choice.gap <= ALLOWED_GAP  # which NaN is not either
        ]
    return Report(comparisons, tuple(problems))


def show(report: Report, tokenizer: Tokenizer, tokens: int) -> None:
    """Print the table, the places of the forced pass, the summary and the problems."""

    def candidates(choice: Choice) -> str:
        both = (choice.ours, choice.theirs)
        return " / ".join(
            f"{token} {tokenizer.token_bytes(token).decode('utf-8', 'replace')!r}" for token in both
        )

    print(f"{'prompt':>6} {'tokens':>6} {'equal':>6} {'parted at':>9} {'gap':>7}  ours / llama.cpp")
    for number, found in enumerate(report.comparisons, 1):
        line = f"{number:6} {found.prompt_tokens:6} {found.equal:6}"
        if found.parting is not None:
            line += f" {found.parting.at:9} {found.parting.gap:7.4f}  {candidates(found.parting)}"
        print(line)

    print("\nllama.cpp's tokens that are not the most likely of the plain float32 forward:")
    for number, found in enumerate(report.comparisons, 1):
        for choice in found.forced:
            print(f"{number:6} {choice.at:23} {choice.gap:7.4f}  {candidates(choice)}")

    every = report.comparisons
    partings = [each.parting for each in every if each.parting is not None]
    forced = [choice for each in every for choice in each.forced]
    print(
        f"\n{len(every) - len(partings)} of {len(every)} prompts equal over {tokens} tokens; "
        f"{sum(each.equal for each in every)} of {len(every) * tokens} tokens before a parting; "
        f"largest gap at a parting {max((c.gap for c in partings), default=0.0):.4f}; "
        f"forced: {len(forced)} of {len(every) * tokens} tokens differ, "
        f"{sum(not c.gap <= ALLOWED_GAP for c in forced)} by more than {ALLOWED_GAP}, "
        f"largest gap {max((c.gap for c in forced), default=0.0):.4f}"
    )
    for problem in report.problems:
        print(f"WRONG: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    known = range(1, len(LENGTHS) + 1)
    parser.add_argument("--prompts", type=int, default=len(known), choices=known, metavar="N")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--widened", action="store_true", help="give llama.cpp a float32 copy of the weights"
    )
    # The threads of both sides spin while they wait for each other: on a machine that is not idle
    # more than one cost far more than they bring.
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    report = compare(
        options.model,
        range(1, options.prompts + 1),
        options.tokens,
        widened=options.widened,
        threads=options.threads,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    show(report, Tokenizer.from_file(options.model), options.tokens)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
