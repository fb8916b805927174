"""Tokens that the device chooses are those the sampler would, whatever a request asks for.

The logits come from a table by the newest token, so that they are the same bits on both sides. The
tests run in Triton's interpreter or on a GPU.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# Triton looks at it when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton", reason="the GPU backend's kernels need triton")

from asyncllm import synthetic
from asyncllm.checkpoint.checkpoint import open_checkpoint
from asyncllm.kernels.cuda.tokens import first_tokens
from asyncllm.kv.blocks import KvCache
from asyncllm.kv.pool import KvPool, layer_groups
from asyncllm.model.causal_lm import CausalLM
from asyncllm.model.config import ModelConfig
from asyncllm.options import SamplingParams
from asyncllm.runner import pipeline, slot_edits
from asyncllm.runner.cuda_step import CudaProgram
from asyncllm.runner.device_model import DeviceModel
from asyncllm.runner.pipeline import CudaRunner
from asyncllm.sampling.sampler import Sampled, Sampler, SamplingState
from asyncllm.scheduler.chunking import ChunkPolicy
from asyncllm.scheduler.request import Request, Sequence
from asyncllm.scheduler.scheduler import NoPlan, Scheduler
from asyncllm.scheduler.step import StepPlan

# numpy, under the interpreter, warns of what a GPU does not mind.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
BLOCK_TOKENS = 16
CONTEXT = 256
CHUNK = 24
VOCABULARY = 128
TINY = synthetic.Shape(1, 256, 256, 4, 2, 64, VOCABULARY, tied=False)


class Scripted(CudaProgram):
    """The program with a table in place of its layers."""

    script: Tensor  # float32 [vocabulary, vocabulary]: logits after each token

    def _embed(self, fresh: Tensor, slots: Tensor, count: int) -> None:
        first_tokens(fresh, slots, self.last, self.tokens[:count])

    def _layers(self, *arguments: Any) -> None:
        pass

    def _head(self, x: Tensor) -> None:
        self._look_up(self.tokens[: len(x)])

    def head(self, index: Tensor) -> None:
        self._look_up(self.tokens[index])

    def _look_up(self, tokens: Tensor) -> None:
        self.logits[: len(tokens), :VOCABULARY] = self.script[tokens.long()]


class WithoutProducts(CudaProgram):
    """The program with noise in place of products, which the interpreter takes minutes for."""

    def _multiply(
        self, products: Any, x: Any, count: int, out: Tensor, *, residual: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(count)
        out[:count] = torch.randn(count, out.shape[1], generator=generator)

    def _gate(self, *arguments: Any) -> None:
        pass


class Device:
    """A model on the device, or a part of it, with all that serves it."""

    def __init__(
        self,
        path: Path,
        *,
        kind: type[CudaProgram] = Scripted,
        max_seqs: int = 4,
        capacity_tokens: int = 1024,
    ) -> None:
        with open_checkpoint(path) as checkpoint:
            config = ModelConfig.from_checkpoint(checkpoint)
            model = CausalLM.bind(checkpoint, config, context_length=CONTEXT)
            weights = DeviceModel(model, DEVICE)
        token_bytes = 2 * 2 * len(config.layers) * config.kv_heads * config.head_dim
        groups = layer_groups(
            config,
            block_tokens=BLOCK_TOKENS,
            chunk=CHUNK,
            max_seqs=max_seqs,
            context_length=CONTEXT,
            kv_bytes=capacity_tokens * token_bytes,
            dtype=torch.float16,
        )
        self.pool = KvPool(
            groups,
            block_tokens=BLOCK_TOKENS,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float16,
            device=str(DEVICE),
        )
        slots = 2 * max_seqs
        self.program = kind(
            model,
            weights,
            self.pool,
            device=DEVICE,
            vocab_size=VOCABULARY,
            max_rows=CHUNK + max_seqs,
            max_batch=max_seqs,
            slots=slots,
            pdl=DEVICE.type == "cuda",
        )
        generator = torch.Generator().manual_seed(3)
        self.script = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.runner = CudaRunner(self.program, self.pool, vocab_size=VOCABULARY, slots=slots)
        cache = KvCache(
            groups,
            block_tokens=BLOCK_TOKENS,
            max_chunk=CHUNK,
            grow=self.runner.grow,
            fingerprint=b"tiny",
            prefix_cache=True,
        )
        self.scheduler = Scheduler(
            cache,
            max_seqs=max_seqs,
            context_length=CONTEXT,
            chunk=ChunkPolicy(CHUNK, 1e9),
            decode_refusal=self.runner.decode_refusal,
        )
        self.modes: list[tuple[str, str]] = []

    def request(self, prompt: list[int], seed: int = 0, **params: Any) -> Request:
        bad_words = params.pop("bad_words_ids", ())
        given = {"max_tokens": 8, "ignore_eos": True, "temperature": 0} | params
        sampling = SamplingParams().updated(given).resolved({})
        request = Request(
            *("r", prompt, sampling), seed=seed, end_ids=frozenset(), bad_words_ids=bad_words
        )
        self.scheduler.add(request)
        return request

    def submit(self) -> Any:
        """The next step under way; `None` if there is none now."""
        if isinstance(self.program, Scripted) and not hasattr(self.program, "script"):
            self.program.script = self.script.to(DEVICE)  # where captured steps find it
        plan = self.scheduler.plan()
        if isinstance(plan, NoPlan):
            return None
        self.modes.append((plan.decode_mode, plan.decode_mode_reason))
        return self.runner.submit(plan)

    def commit(self, ticket: Any) -> None:
        self.scheduler.commit(self.runner.collect(ticket), {})

    def run(self, *, ahead: bool = True) -> None:
        """All steps, each submitted before the one before it is read, or after."""
        outstanding = None
        while self.scheduler.has_work or outstanding is not None:
            ticket = self.submit()
            if outstanding is not None:
                self.commit(outstanding)
            outstanding = ticket
            if not ahead and ticket is not None:
                self.commit(ticket)
                outstanding = None
        assert self.scheduler.cache.blocks_used == 0

    def expected(self, request: Request) -> list[int]:
        """The tokens that the sampler chooses by the same table."""
        sequence = request.sequences[0]
        state = SamplingState(sequence.spec, VOCABULARY)
        sampler, token = Sampler(VOCABULARY), request.prompt_ids[-1]
        output: list[int] = []
        while len(output) < (request.params.max_tokens or 0):
            (result,) = sampler.sample(self.script[token][None].clone(), [state])
            assert isinstance(result, Sampled), result
            token = result.token
            output.append(token)
            if token in request.end_ids and len(output) > request.params.min_tokens:
                break
        return output


def output(request: Request) -> list[int]:
    sequence = request.sequences[0]
    assert sequence.error is None, sequence.error
    return sequence.output_ids


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "tinier", TINY)
        synthetic.write("tinier", path)
    return path


def settle() -> None:
    """Wait for the device: the runner's stream does not wait for the tests' own."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def never(*arguments: object) -> Any:
    raise AssertionError("the host chose a token")


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.9,
    "frequency_penalty": 0.35,
}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.9}


@pytest.mark.parametrize("ahead", [False, True])
def test_penalties_and_biases_choose_the_samplers_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    device = Device(tiny)
    # A few tokens that follow each other, so that penalties change what comes next.
    device.script[:, :6] += 5.0
    monkeypatch.setattr(device.runner, "_host_choice", never)
    banned = {int(device.script[9].argmax()): -math.inf, 3: 1.5, 70: 6.0}
    asked: list[dict[str, Any]] = [
        PENALTIES,
        {"logit_bias": banned, "frequency_penalty": -0.2},
        DRAWN | PENALTIES | {"logit_bias": {4: 2.0}, "seed": 11},
        {"bad_words_ids": ((4,), (2,))},
        {},  # beside the others as it would be alone
        DRAWN | {"min_p": 0.01, "seed": 12},
        {"repetition_penalty": 0.6, "logit_bias": {5: 1e30}},
    ]
    requests = [
        device.request([7, 3, 3, 9], max_tokens=5 + number, **params)
        for number, params in enumerate(asked)
    ]
    device.run(ahead=ahead)
    outputs = [output(request) for request in requests]
    assert outputs == [device.expected(request) for request in requests]
    assert len({tuple(tokens[:5]) for tokens in outputs}) == len(outputs)
    assert ("batched", "4 sequences are decoding") in device.modes


def test_min_tokens_forbids_ends_for_so_long_and_no_longer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tiny)
    monkeypatch.setattr(device.runner, "_host_choice", never)
    device.script[:, [50, 60]] += 30.0
    request = device.request(
        [1, 2], min_tokens=3, stop_token_ids=[50, 60], logit_bias={60: 5.0, 70: 4.0}
    )
    plain = device.request([1, 3], min_tokens=2, stop_token_ids=[50])
    device.run()
    assert len(output(request)) == 4
    assert output(request) == device.expected(request)
    assert output(plain) == device.expected(plain)
    assert device.modes[-1] == ("pipelined", "")


def test_a_slot_is_the_new_sequences_although_the_old_ones_step_was_under_way(tiny: Path) -> None:
    device = Device(tiny, max_seqs=1)
    device.script[:, :6] += 5.0
    first = device.request([4, 8], max_tokens=100, stop_token_ids=[5], **PENALTIES)
    second = device.request([4, 8, 9], **PENALTIES)
    slots: set[int] = set()
    put = slot_edits.SlotEdits.put

    def noted(edits: slot_edits.SlotEdits, slot: int, state: SamplingState) -> None:
        slots.add(slot)
        put(edits, slot, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_edits.SlotEdits, "put", noted)
        device.run()
    assert len(slots) == 1
    assert len(output(first)) < 100
    for request in (first, second):
        assert output(request) == device.expected(request)
    # One step more than tokens, which nobody read.
    assert len(device.modes) > len(output(first)) + len(output(second))


@pytest.mark.parametrize("taken", [False, True])
def test_a_preempted_sequence_goes_on_with_what_it_had_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    device = Device(tiny, max_seqs=2, capacity_tokens=3 * BLOCK_TOKENS)
    device.script[:, :12] += 5.0
    requests = [
        device.request([number, 3, 9, 9], max_tokens=25, **PENALTIES) for number in range(3)
    ]
    preempt = device.scheduler._preempt

    def and_lose_the_slot(sequence: Sequence) -> None:
        preempt(sequence)
        device.runner._free_slot(sequence.sequence_id)
        # Another's that came between.
        counts = device.program.make_edits().arrays.counts
        with torch.inference_mode():
            counts[list(device.runner._free_slots)] = 77
        settle()

    if taken:
        monkeypatch.setattr(device.scheduler, "_preempt", and_lose_the_slot)
    device.run()
    assert device.scheduler.preempted > 0
    for request in requests:
        assert output(request) == device.expected(request)


HOST: list[tuple[dict[str, Any], str]] = [
    ({"logits_processors": [lambda ids, logits: logits.roll(len(ids))]}, "has logits_processors"),
    ({"logprobs": 1, "logit_bias": {5: 40.0}}, "wants logprobs"),
    ({"typical_p": 0.2, "temperature": 1.0, "seed": 4}, "has typical_p"),
    ({"temperature": 2e4, "seed": 4}, "temperature is above 10000"),
    ({"bad_words_ids": ((1, 2),), "logit_bias": {1: 40.0, 2: 39.0}}, "bad_words of several tokens"),
    ({"logit_bias": dict.fromkeys(range(60), 9.0)}, "has 60 biases"),
]


@pytest.mark.parametrize(("params", "reason"), HOST, ids=[reason for _, reason in HOST])
def test_what_only_the_host_can_choose_it_chooses_and_the_reason_is_told(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(pipeline, "MOST_BIASES", 59)
    device = Device(tiny)
    request = device.request([1, 2, 3], max_tokens=5, **params)
    beside = device.request([1, 2], max_tokens=3, **PENALTIES)
    device.run()
    assert output(request) == device.expected(request)
    assert output(beside) == device.expected(beside)
    plain = [why for mode, why in device.modes if mode == "plain" and "host chooses" in why]
    assert len(plain) == 4
    assert all(reason in why for why in plain)
    assert not any(mode == "pipelined" for mode, _ in device.modes)


def test_without_memory_for_penalties_the_host_chooses(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device = Device(tiny)
    monkeypatch.setattr(device.program, "make_edits", full)
    request = device.request([1, 2, 3], **PENALTIES)
    device.run()
    assert output(request) == device.expected(request)
    assert "no device memory" in device.modes[-1][1]


def test_one_sampled_sequence_is_pipelined(tiny: Path) -> None:
    device = Device(tiny)
    request = device.request([1, 2, 3], **DRAWN, **PENALTIES)
    device.run()
    assert output(request) == device.expected(request)
    assert device.modes[0] == ("plain", "no sequence is decoding")
    assert set(device.modes[1:]) == {("pipelined", "")}


def test_a_prompt_chunk_beside_decoding_sequences_makes_a_plain_step(tiny: Path) -> None:
    device = Device(tiny)
    first = [device.request([1, 2, number], max_tokens=6) for number in range(2)]
    tickets = [device.submit(), device.submit()]
    late = device.request([5, 6, 7], max_tokens=2)
    for ticket in tickets:
        device.commit(ticket)
    device.run()
    assert ("plain", "a prompt chunk shares the step") in device.modes
    for request in (*first, late):
        assert output(request) == device.expected(request)


@pytest.mark.parametrize(
    ("bias", "logit", "amiss"),
    [({5: 3.4e38}, 3.4e38, "leave logits that are infinite"), ({}, math.nan, "not numbers")],
)
def test_logits_without_a_choice_fail_the_row_alone(
    tiny: Path, bias: dict[int, float], logit: float, amiss: str
) -> None:
    device = Device(tiny)
    device.script[9, 5] = logit
    sick = device.request([1, 9], logit_bias=bias or None)
    well = device.request([1, 2], **PENALTIES)
    device.run()
    assert amiss in str(sick.sequences[0].error)
    assert output(well) == device.expected(well)


def test_a_captured_steps_phases_are_recorded(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = Device(tiny)
    for number in range(3):
        device.request([1, 2, number], max_tokens=3)
    with caplog.at_level(logging.DEBUG, "asyncllm"):
        device.run()
    found = [
        vars(record)["fields"]
        for record in caplog.records
        if vars(record).get("event") == "decode-batch-phase"
    ]
    assert len(found) == 2
    for fields in found:
        assert (fields["rows"], fields["padded"]) == (3, 4)
        for name in ("embedding_ns", "upload_ns", "issue_ns", "device_tail_ns"):
            assert fields[name] >= 0
        assert fields["issue_ns"] > 0


def test_rows_that_only_pad_a_step_leave_nothing_behind(tiny: Path) -> None:
    """A step of three rows padded to four writes the K and V of three positions, and no more."""
    device = Device(tiny, kind=WithoutProducts if DEVICE.type == "cpu" else CudaProgram)
    requests = [device.request([number], max_tokens=3, **PENALTIES) for number in range(4)]
    tickets = [device.submit(), device.submit()]  # the prompts, then all four
    device.commit(tickets[0])
    device.scheduler.cancel(requests[1])
    device.commit(tickets[1])
    plan = device.scheduler.plan()
    assert isinstance(plan, StepPlan)
    assert [row.offset for row in plan.rows] == [2] * 3

    edits = device.program.make_edits().arrays
    # On a GPU there is memory for what was granted; on a CPU a null block as well.
    blocks = None if DEVICE.type == "cpu" else device.pool.granted[0]
    watched = [*device.pool.keys.values(), *device.pool.values.values()]
    watched = [each[:blocks].view(torch.int16).flatten(0, 1) for each in watched]
    free = torch.ones(len(watched[0]), dtype=torch.bool, device=DEVICE)  # of every position
    for row in plan.rows:
        (table,) = row.block_tables
        free[table[0] * BLOCK_TOKENS : table[0] * BLOCK_TOKENS + row.offset] = False
    for each in watched:
        each[free] = torch.tensor(math.nan).half().view(torch.int16).item()
    settle()
    before = [each.clone() for each in (*watched, device.program.last, edits.counts)]
    settle()
    device.commit(device.runner.submit(plan))
    after = [*watched, device.program.last, edits.counts]

    slots = {device.runner._slot_of[row.sequence_id] for row in plan.rows}
    written = {row.block_tables[0][0] * BLOCK_TOKENS + row.offset for row in plan.rows}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = (old != new).view(len(old), -1).any(1).nonzero()[:, 0].tolist()
        if number < len(watched):
            assert set(changed) == written
        else:
            assert set(changed) <= slots
    assert all(output(request) for request in requests)
