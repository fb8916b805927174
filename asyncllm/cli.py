"""The command line: `asyncllm run`, `info`, `bench` and `store`. A caller of the public API."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncllm import bench, synthetic
from asyncllm.engine import AsyncEngine
from asyncllm.errors import AsyncLLMError, RequestError
from asyncllm.generation import Generation
from asyncllm.info import LoadProgress
from asyncllm.kv import store_tool
from asyncllm.options import EngineOptions, SamplingParams
from asyncllm.version import __version__

# What a person may want to set from a shell; everything else is a matter for the API.
OPTION_FLAGS: dict[str, type] = {
    "context_length": int,
    "max_seqs": int,
    "kv_bytes": int,
    "device": str,
    "dtype": str,
    "threads": int,
}
# What `bench` takes lists of, and numbers with their defaults.
BENCH_NUMBERS = {
    "threads": "measure with each of these numbers of threads",
    "batches": "decode with so many sequences at once",
    "depths": "each batch with so many tokens in each sequence before (default 0)",
    "prompts": "prompts of so many tokens",
}
BENCH_COUNTS: dict[str, tuple[int | None, str]] = {
    "rounds": (3, "times that each is measured (default 3)"),
    "tokens": (128, "of one sequence, and of each of a batch (default 128)"),
    "sequences": (None, "at once, with half as many tokens each (default 8)"),
    "prompt_tokens": (None, "of the long prompt (default 512)"),
}
BENCH_FLAGS: dict[str, type] = {"device": str, "dtype": str}
SAMPLING_FLAGS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parsers = {
        "run": _run_parser(),
        "info": _info_parser(),
        "bench": _bench_parser(),
        "store": _store_parser(),
    }
    chosen = _parser(list(parsers)).parse_args(argv)
    # Intermixed: an option may stand between MODEL and PROMPT.
    arguments = parsers[chosen.command].parse_intermixed_args(chosen.arguments)
    try:
        status: int = asyncio.run(arguments.run(arguments))
        return status
    except AsyncLLMError as exc:
        print(f"asyncllm: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1


def _parser(commands: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm",
        description="Run language models from GGUF files.",
        epilog="asyncllm COMMAND --help says more of each.",
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    parser.add_argument(
        "command",
        choices=commands,
        help="run streams an answer, info describes, bench measures how fast it is, "
        "store looks after a block store",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see asyncllm COMMAND --help")
    return parser


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm run",
        description="Stream an answer to stdout. A model with a chat template is spoken to as a "
        "chat. Without PROMPT a conversation is read from a terminal; from a pipe all of it is "
        "one prompt.",
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - reads stdin")
    parser.add_argument("--system", help="a system message, for models with a chat template")
    parser.add_argument("--raw", action="store_true", help="continue the prompt; no chat template")
    parser.add_argument("--stats", action="store_true", help="print counts and times to stderr")
    _add_flags(parser, SAMPLING_FLAGS)
    _add_flags(parser, OPTION_FLAGS)
    parser.set_defaults(run=_run)
    return parser


def _info_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm info", description="Load a model and say what it is."
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_flags(parser, OPTION_FLAGS)
    parser.set_defaults(run=_info)
    return parser


def _bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm bench",
        description="Measure tokens per second through the public API: one sequence, several at "
        "once, and a long prompt that no cache knows; on a GPU, batches and prompts of several "
        "sizes.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a GGUF file")
    parser.add_argument(
        "--synthetic",
        metavar="NAME",
        help=f"instead of MODEL, one that is made: {', '.join(synthetic.SHAPES)}",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="where what --synthetic makes stays"
    )
    for name, what in BENCH_NUMBERS.items():
        parser.add_argument(
            f"--{name}", type=_numbers, action="extend", default=[], metavar="N[,N]", help=what
        )
    for name, (default, what) in BENCH_COUNTS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=int, default=default, metavar="N", help=what
        )
    parser.add_argument(
        "--allocations", action="store_true", help="count what decoding allocates on a GPU"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="on a GPU with one arithmetic for every number of rows",
    )
    parser.add_argument(
        "--reload", action="store_true", help="load the model a second time, and time that"
    )
    parser.add_argument(
        "--vs-llamacpp",
        nargs="?",
        const="",
        metavar="PATH",
        help="compare in turns with llama.cpp: the package xllamacpp, or a llama-bench at PATH",
    )
    parser.add_argument(
        "--llamacpp-model", type=Path, metavar="FILE", help="another file for llama.cpp"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_flags(parser, BENCH_FLAGS)
    parser.set_defaults(run=_bench)
    return parser


def _store_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm store",
        description="Look after the file of a block store (EngineOptions.kv_store): info says what "
        "is in it, verify reads all of it, clear empties it.",
    )
    parser.add_argument("action", choices=["info", "verify", "clear"])
    parser.add_argument("path", metavar="PATH", type=Path, help="the file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_store)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _add_flags(parser: argparse.ArgumentParser, flags: dict[str, type]) -> None:
    for name, kind in flags.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=None, metavar=kind.__name__.upper()
        )


def _given(arguments: argparse.Namespace, flags: dict[str, type]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in flags}
    return {name: value for name, value in values.items() if value is not None}


def _options(arguments: argparse.Namespace) -> EngineOptions:
    return EngineOptions().updated(_given(arguments, OPTION_FLAGS))


def _progress(report: LoadProgress) -> None:
    if sys.stderr.isatty():
        end = "\r\033[K" if report.fraction >= 1 else "\r"
        print(f"\033[Kloading {report.fraction:4.0%} {report.stage}", end=end, file=sys.stderr)


async def _run(arguments: argparse.Namespace) -> int:
    sampling = SamplingParams().updated(_given(arguments, SAMPLING_FLAGS))
    options = _options(arguments)
    prompt = arguments.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = await asyncio.to_thread(sys.stdin.read)
    if prompt is not None and not prompt.strip():
        raise RequestError("the prompt is empty")
    async with AsyncEngine.load(arguments.model, options, on_progress=_progress) as engine:
        chats = engine.tokenizer.chat_template is not None and not arguments.raw
        opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
        if prompt is None:
            return await _converse(engine, sampling, opening if chats else None, arguments.stats)
        if chats:
            generation = engine.chat([*opening, _said("user", prompt)], sampling)
        else:
            generation = engine.generate(prompt, sampling)
        await _stream(generation, arguments.stats)
    return 0


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def _read_line(mark: str) -> str:
    """A line from the terminal, without a thread: one blocked in a read would outlive Ctrl-C."""
    print(mark, end="", flush=True)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    line: str
    try:
        loop.add_reader(sys.stdin, readable.set)
    except NotImplementedError:  # Windows
        line = await asyncio.to_thread(sys.stdin.readline)
    else:
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sys.stdin)
        line = sys.stdin.readline()  # a terminal gives whole lines
    if not line:
        raise EOFError
    return line.rstrip("\n")


async def _converse(
    engine: AsyncEngine,
    sampling: SamplingParams,
    messages: list[dict[str, str]] | None,
    stats: bool,
) -> int:
    """Turns of a conversation until end of input; `messages=None`: prompts to be continued."""
    while True:
        try:
            line = await _read_line("> ")
        except EOFError:
            print()
            return 0
        if not line.strip():
            continue
        if messages is None:
            await _stream(engine.generate(line, sampling), stats)
            continue
        messages.append(_said("user", line))
        answer = await _stream(engine.chat(messages, sampling), stats)
        messages.append(_said("assistant", answer))


async def _stream(generation: Generation, stats: bool) -> str:
    async for chunk in generation:
        if chunk.index == 0:
            print(chunk.text, end="", flush=True)
    print()
    completion = await generation
    if stats:
        usage, timings = completion.usage, completion.timings
        decode_s = timings.total_s - (timings.first_token_s or 0.0)
        later = usage.completion_tokens - 1
        print(
            f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
            f"first token after {timings.first_token_s or 0.0:.2f} s; "
            f"{usage.completion_tokens} tokens"
            + (f" at {later / decode_s:.1f} tokens/s" if later > 0 and decode_s > 0 else "")
            + f"; ended by {completion.finish_reason}",
            file=sys.stderr,
        )
    return completion.text


async def _info(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    async with AsyncEngine.load(arguments.model, options, on_progress=_progress) as engine:
        info = engine.info
        if arguments.json:
            print(json.dumps(dataclasses.asdict(info), indent=2))
            return 0
        formats = ", ".join(f"{name} ({count})" for name, count in info.formats.items())
        rows = {
            "name": info.name,
            "architecture": info.architecture,
            "parameters": f"{info.parameters / 1e6:,.1f} million",
            "formats (tensors)": formats,
            "weights": f"{info.weights_bytes / 1e6:,.1f} MB",
            "context": f"{info.context_length:,} of {info.model_context_length:,} tokens",
            "K/V ceiling": f"{info.kv_ceiling_tokens:,} tokens, "
            f"{info.kv_ceiling_bytes / 1e6:,.1f} MB",
            "device": f"{info.device}, activations {info.dtype}, K/V {info.kv_dtype}",
            "backend": info.backend,
            "vocabulary": f"{engine.tokenizer.vocab_size:,} tokens",
            "chat template": "yes" if engine.tokenizer.chat_template is not None else "no",
        }
        for label, value in rows.items():
            print(f"{label:18} {value}")
        for note in info.backend_notes:
            print(f"{'note':18} {note}")
        for stage in info.load_stages:
            print(f"{'load: ' + stage.name:18} {stage.seconds:8.3f} s")
    return 0


async def _store(arguments: argparse.Namespace) -> int:
    path: Path = arguments.path
    if arguments.action == "clear":
        await asyncio.to_thread(store_tool.clear, path)
        return 0
    if arguments.action == "verify":
        whole, broken = await asyncio.to_thread(store_tool.verify, path)
        if arguments.json:
            print(json.dumps({"whole": whole, "broken": broken}))
        else:
            print(f"{whole} blocks are whole, {broken} are not and will never be used")
        return 1 if broken else 0
    content = await asyncio.to_thread(store_tool.content, path)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(content), indent=2))
        return 0
    rows = {
        "model": content.name,
        "fingerprint": content.fingerprint,
        "size at most": f"{content.file_bytes / 1e6:,.1f} MB",
        "tokens in a block": str(content.block_tokens),
    }
    for number, group in enumerate(content.groups):
        rows[f"layer group {number}"] = (
            f"{group.blocks:,} of {group.extents:,} blocks of {group.extent_bytes:,} bytes"
        )
    for label, value in rows.items():
        print(f"{label:18} {value}")
    return 0


async def _bench(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) == (arguments.synthetic is None):
        raise bench.BenchError("model: give either MODEL or --synthetic NAME")
    if arguments.keep is not None and arguments.synthetic is None:
        raise bench.BenchError("keep: only what --synthetic makes can be kept")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in BENCH_COUNTS}
    for name in BENCH_NUMBERS:
        given[name] = tuple(dict.fromkeys(getattr(arguments, name)))
    settings = bench.Settings(
        model=Path(arguments.model or arguments.synthetic),
        **given,
        allocations=arguments.allocations,
        reload=arguments.reload,
        llamacpp=arguments.vs_llamacpp,
        llamacpp_model=arguments.llamacpp_model,
        options=EngineOptions(deterministic=arguments.deterministic).updated(
            _given(arguments, BENCH_FLAGS)
        ),
    )

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\033[K{what}", end="\r", file=sys.stderr, flush=True)

    if arguments.synthetic is None:
        report = await bench.bench(settings, say=say)
    else:
        made = bench.synthetic_checkpoint(arguments.synthetic, arguments.keep, say)
        async with made as model:
            report = await bench.bench(dataclasses.replace(settings, model=model), say=say)
    say("")
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
