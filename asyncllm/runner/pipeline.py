"""`CudaRunner`: steps on a device, queued one ahead of what the host has read.

Everything of a step is put onto one stream, with an event behind it that is all `collect` waits
for. A decoding batch replays a captured graph, which reads the few words a row that the host knows
from pinned memory and leaves the chosen tokens there; the input of a row whose token the host has
not seen yet stays on the device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from asyncllm import telemetry
from asyncllm.kernels.cuda.choice import SICK
from asyncllm.runner.chunk_passes import ChunkPasses
from asyncllm.runner.cuda_step import (
    FIELDS,
    FRESH,
    HOLDING,
    INDEX,
    MIN_P,
    OUTPUT,
    POSITION,
    RING,
    SEED,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    CudaProgram,
    Form,
)
from asyncllm.runner.runner import StepTimes, row_result
from asyncllm.runner.slot_edits import MOST_BIASES
from asyncllm.sampling.sampler import (
    Sampled,
    Sampler,
    SamplingState,
    prompt_logprobs,
    sick_edits,
    sick_logits,
)
from asyncllm.scheduler.step import (
    DecodeMode,
    Row,
    StepPlan,
    StepResult,
    TokenLogprob,
)

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool

# Batches are padded to one of these sizes, so that few graphs serve all.
BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

# Rows of prompt chunks that meet kernels which no other size does, and sizes that are captured
# before anybody asks; others when they come for the second time.
PROMPTS: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)

# Steps whose uploads and results may be under way at a time: the one computed, the one queued, and
# one that the host is writing.
IN_FLIGHT: Final = 3


class _Buffers:
    """Pinned memory of one step in flight."""

    def __init__(self, program: CudaProgram, longest_table: int) -> None:
        on_device = program.device.type == "cuda"

        def host(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=on_device)

        self.fields = host(FIELDS * program.max_batch)
        self.rows = host(3 * program.max_rows)
        self.spans = host(program.max_batch, 4)
        self.chosen = host(program.max_batch, dtype=torch.int64)
        self.tables = host(program.max_batch, longest_table)
        self.tokens = host(program.max_batch)
        self.event = torch.cuda.Event() if on_device else None
        self.words = self.fields.numpy()


@dataclass(slots=True)
class _Ticket:
    """A step that was put onto the stream.

    Attributes:
        rows: of the plan.
        states: of their sequences, which may have ended since.
        wanting: indices of rows whose tokens are chosen, in the order of `tokens`.
        buffers: what goes to the device.
        tokens: where they arrive.
        started: when it was submitted.
        host: rows that the host chooses for, with their logits on the way to it.
        scores: log-probabilities of prompts, by row.
        waited_s: how long the host waited for it.
        results: once it is finished.
        phases: fields of its `decode-batch-phase` record, if anyone wants one.
        moves: whether blocks go to the host's memory, or come from there.
    """

    rows: Sequence[Row]
    states: list[SamplingState]
    wanting: list[int]
    buffers: _Buffers
    tokens: Tensor
    started: float
    host: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    waited_s: float = 0.0
    results: dict[int, Sampled | Exception] | None = None
    phases: dict[str, int] | None = None
    moves: bool = False


class CudaRunner:
    """Executes plans on a device.

    Args:
        program: what computes.
        pool: where K and V are; closed with the runner.
        vocab_size: tokens that may be chosen.
        slots: sequences the device knows at once.
        should_stop: not asked: a step on a device is short.
    """

    def __init__(self, program: CudaProgram, pool: KvPool, *, vocab_size: int, slots: int) -> None:
        self.program = program
        self._pool, self._vocab_size = pool, vocab_size
        self._on_device = program.device.type == "cuda"
        self._stream = torch.cuda.Stream(program.device) if self._on_device else None
        longest = max(table.shape[1] for table in program.tables)
        self._buffers = [_Buffers(program, longest * len(program.tables)) for _ in range(IN_FLIGHT)]
        self._turn = 0
        self._graphs: dict[Form, Any] = {}
        self._passes = ChunkPasses(program, captures=self._on_device)
        self._sampler = Sampler(vocab_size)
        self._states: dict[int, SamplingState] = {}
        self._slot_of: dict[int, int] = {}
        self._free_slots = list(range(slots))
        self._held: dict[int, tuple[Sequence[int], ...]] = {}  # by slot: what its tables have
        self._outstanding: list[_Ticket] = []
        self._closed = False
        self._times = StepTimes()
        self._no_edits: str | None = None  # why penalties and biases are left to the host

    # The runner's protocol.

    def overlaps(self, plan: StepPlan) -> bool:
        """Always: the device works by itself."""
        return True

    def decode_refusal(self, mode: DecodeMode, rows: Sequence[Row]) -> str | None:
        """Why the rows' tokens cannot be chosen on the device by one captured step."""
        if any(row.count > 1 or not row.wants_token for row in rows):
            return "a prompt chunk shares the step"
        for row in rows:
            reason = self._host_reason(row)
            if reason is not None:
                return f"the host chooses the tokens of a sequence: {reason}"
        return None

    def submit(self, plan: StepPlan) -> _Ticket:
        """Put a step onto the stream."""
        started = perf_counter()
        with self._on_stream(), torch.inference_mode():
            for sequence_id in plan.released:
                self._forget(sequence_id)
            self._pool.prepare(plan)
            buffers = self._next_buffers()
            states = [self._state(row) for row in plan.rows]
            ticket = _Ticket(plan.rows, states, [], buffers, buffers.tokens, started)
            ticket.moves = bool(plan.saves or plan.loads)
            if plan.rows:
                self._run(ticket)
            if buffers.event is not None and (plan.rows or ticket.moves):
                buffers.event.record(self._stream)
        self._outstanding.append(ticket)
        return ticket

    def collect(self, ticket: _Ticket) -> StepResult:
        """Wait for a step's tokens."""
        results = self._finish(ticket)
        if ticket in self._outstanding:
            self._outstanding.remove(ticket)
        failures = tuple(self.program.failures)
        self.program.failures.clear()
        return StepResult(
            tuple(
                row_result(row, results.get(index), ticket.scores.get(index, ()))
                for index, row in enumerate(ticket.rows)
            ),
            self._times.since(ticket.started),
            launch_failures=failures,
            waited_s=ticket.waited_s,
        )

    def tune(self, plan: StepPlan) -> None:
        """Compile, and capture, what requests will meet: decoding of every size, prompts' ends.

        Steps whose tokens are drawn, or whose logits are edited, are captured on first need; what
        draws is compiled here.
        """
        if not self._on_device:
            return
        program = self.program
        sizes = sorted({*(size for size in BATCHES if size < program.max_batch), program.max_batch})
        with self._on_stream(), torch.inference_mode():
            for count in sizes:
                for reach in sorted({program.reach(0), program.reach(program.context - 1)}):
                    form = Form(count, reach=reach)
                    self._graph(form)
                self._rehearse(replace(form, sampled=True, searches=(True, True)))
        row, size = plan.rows[0], self._pool.block_tokens
        for count in PROMPTS:
            if count <= min(program.max_rows, program.context - 1):
                tables = ((0,) * -(-count // size),) * len(row.block_tables)
                part = replace(row, offset=0, count=count, tokens=(0,) * count, output_count=0)
                part = replace(part, block_tables=tables)
                for _ in range(2):
                    self.collect(self.submit(StepPlan((part,))))

    def grow(self, group: int, blocks: int) -> int:
        return self._pool.grow(group, blocks)

    def close(self) -> None:
        """Let go of everything on the device. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.synchronize()
        self._graphs.clear()
        self._passes.close()
        self._buffers.clear()
        self._states.clear()
        self._pool.close()
        del self.program
        if self._on_device:
            torch.cuda.empty_cache()

    # One step.

    def _run(self, ticket: _Ticket) -> None:
        rows = ticket.rows
        self._know_tokens(rows)
        began = perf_counter_ns()
        slots = self._write_tables(ticket)
        upload_ns = perf_counter_ns() - began
        ticket.wanting = [index for index, row in enumerate(rows) if row.wants_token]
        if self.decode_refusal("batched", rows) is None:
            self._decode(ticket, slots, upload_ns)
        else:
            self._chunks(ticket, slots)

    def _decode(self, ticket: _Ticket, slots: Sequence[int], upload_ns: int) -> None:
        rows, program = ticket.rows, self.program
        count = len(rows)
        batch = next(size for size in (*BATCHES, program.max_batch) if size >= count)
        batch = min(batch, program.max_batch)
        began = perf_counter_ns()
        words = program.ring[program.turn % RING].numpy()
        form = self._write_fields(words, rows, slots, batch)
        written = perf_counter_ns()
        graph = self._graph(form)
        ready = perf_counter_ns()
        ticket.tokens = program.results[program.turn % RING]
        if graph is None:
            program.decode(form)
        else:
            graph.replay()
            program.turn += 1
        if telemetry.enabled():
            ticket.phases = {
                "embedding_ns": written - began,
                "upload_ns": upload_ns,
                "issue_ns": perf_counter_ns() - ready,
                "rows": count,
                "padded": batch,
            }

    def _graph(self, form: Form) -> Any:
        """The captured step of a form; `None` where nothing can be captured."""
        if not self._on_device:
            return None
        graph = self._graphs.get(form)
        if graph is None:
            program, started = self.program, perf_counter()
            self._rehearse(form)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                program.decode(form)
            program.turn -= 1  # it was not run
            self._graphs[form] = graph
            seconds = perf_counter() - started
            telemetry.record("graph-captured", **asdict(form), seconds=seconds)
        return graph

    def _rehearse(self, form: Form) -> None:
        """Decode padding alone, which compiles what is new and leaves nothing behind.

        Chained rows read what sequences chose last, and penalties what they chose so far.
        """
        program = self.program
        entry = program.ring[program.turn % RING]
        real = entry.clone()
        entry[SLOT * program.max_batch : SLOT * program.max_batch + form.count] = -1
        program.decode(form)
        torch.cuda.current_stream().synchronize()
        program.ring[program.turn % RING] = real

    def _chunks(self, ticket: _Ticket, slots: Sequence[int]) -> None:
        rows, buffers, program = ticket.rows, ticket.buffers, self.program
        count = sum(row.count for row in rows)
        size = self._passes.size(count, len(rows))
        table = buffers.rows.numpy()[: 3 * size[0]].reshape(3, size[0])
        spans = buffers.spans.numpy()
        table[0, count:], table[1:, count:], spans[len(rows) : size[1]] = -1, 0, 0
        first, last = 0, []
        for number, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            end = first + row.count
            table[0, first:end] = slot
            table[1, first:end] = range(row.offset, row.offset + row.count)
            table[2, first:end] = self._fresh(row) if row.count == 1 else row.tokens
            spans[number] = (first, row.count, row.offset, slot)
            last.append(end - 1)
            first = end
        self._passes.run(buffers.rows, buffers.spans, size)

        for index, row in enumerate(rows):
            if row.sampling.params.prompt_logprobs is not None:
                ticket.scores[index] = self._scores(row, last[index] - row.count + 1)
        wanting = ticket.wanting
        if not wanting:
            return
        chosen = [rows[index] for index in wanting]
        buffers.chosen[: len(wanting)] = torch.tensor([last[index] for index in wanting])
        program.head(buffers.chosen[: len(wanting)].to(program.device, non_blocking=True))
        own_slots = [slots[index] for index in wanting]
        form = self._write_fields(buffers.words, chosen, own_slots, len(wanting))
        program.fields.copy_(buffers.fields, non_blocking=True)
        for place, index in enumerate(wanting):
            if self._host_reason(rows[index]) is not None:
                logits = program.logits[place, : self._vocab_size]
                ticket.host[index] = logits.to("cpu", copy=True)
        program.choose(form)
        buffers.tokens[: len(wanting)].copy_(program.next_tokens[: len(wanting)], non_blocking=True)

    def _scores(self, row: Row, start: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the prompt tokens that follow the row's, in bounded slices."""
        wanted = row.sampling.params.prompt_logprobs
        following = row.sampling.prompt_ids[row.offset + 1 : row.offset + row.count + 1]
        size = self.program.max_batch
        scores: list[TokenLogprob] = []
        for at in range(0, len(following), size):
            part = following[at : at + size]
            numbers = torch.arange(start + at, start + at + len(part), device=self.program.device)
            self.program.head(numbers)
            logits = self.program.logits[: len(part), : self._vocab_size].cpu()
            if self.program.config.final_softcap:
                cap = self.program.config.final_softcap
                logits = cap * torch.tanh(logits / cap)
            scores += prompt_logprobs(logits, part, wanted or 0)
        return tuple(scores)

    def _finish(self, ticket: _Ticket) -> dict[int, Sampled | Exception]:
        """A step's tokens, waited for once."""
        if ticket.results is not None:
            return ticket.results
        if (ticket.rows or ticket.moves) and ticket.buffers.event is not None:
            started = perf_counter()
            ticket.buffers.event.synchronize()
            ticket.waited_s = perf_counter() - started
        if ticket.phases is not None:
            tail_ns = round(ticket.waited_s * 1e9)
            telemetry.record("decode-batch-phase", **ticket.phases, device_tail_ns=tail_ns)
        tokens = ticket.tokens[: len(ticket.wanting)].tolist() if ticket.wanting else []
        results: dict[int, Sampled | Exception] = {}
        for index, token in zip(ticket.wanting, tokens, strict=True):
            state = ticket.states[index]
            if index in ticket.host:
                results[index] = self._host_choice(ticket.host[index], state)
            elif token < 0:
                results[index] = (sick_edits if state.edits else sick_logits)(SICK[token])
            else:
                state.append(token)
                results[index] = Sampled(token)
        ticket.results = results
        return results

    def _host_choice(self, logits: Tensor, state: SamplingState) -> Sampled | Exception:
        cap = self.program.config.final_softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        return self._sampler.sample(logits[None], [state])[0]

    # What rows need.

    def _host_reason(self, row: Row) -> str | None:
        """Why the host chooses the row's token, if it does: the same for all of a sequence."""
        state = self._state(row)
        if state.host_reason is not None or not state.ever_edits:
            return state.host_reason
        if len(state.biases) > MOST_BIASES:
            return (
                f"it has {len(state.biases)} biases, forbidden ids among them; "
                f"the device takes {MOST_BIASES}"
            )
        self._need_edits()
        return self._no_edits

    def _need_edits(self) -> None:
        """Make room for penalties and biases when the first sequence has some."""
        if self.program.edits is not None or self._no_edits is not None:
            return
        try:
            with self._on_stream():
                edits = self.program.make_edits()
        except torch.OutOfMemoryError:
            self._no_edits = "it has penalties or biases, and no device memory is left for them"
        else:
            telemetry.record("edits-allocated", bytes=edits.nbytes)

    def _know_tokens(self, rows: Sequence[Row]) -> None:
        """Finish steps in flight whose tokens the host chose, where a row goes on from one."""
        for ticket in self._outstanding:
            if ticket.host and any(row.chained for row in rows):
                self._finish(ticket)

    def _state(self, row: Row) -> SamplingState:
        state = self._states.get(row.sequence_id)
        if state is None:
            state = self._states[row.sequence_id] = SamplingState(row.sampling, self._vocab_size)
        return state

    def _fresh(self, row: Row) -> int:
        """The row's token, or -1 where the device has it."""
        if not row.chained:
            return row.tokens[0]
        for ticket in self._outstanding:
            for index in ticket.host:
                if ticket.rows[index].sequence_id == row.sequence_id:
                    return (self._state(row).output_ids or [0])[-1]
        return -1

    def _write_fields(
        self, words: Any, rows: Sequence[Row], slots: Sequence[int], batch: int
    ) -> Form:
        """Write the batch, padded to `batch` rows; what the step has to be able to do."""
        floats, size = words.view("float32"), self.program.max_batch
        sampled = by_k = by_p = edited = False
        for place, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            state = self._state(row)
            params = state.filter
            words[SLOT * size + place] = slot
            holding = -1
            if state.edits_after(row.output_count) and self._host_reason(row) is None:
                edited, holding = True, state.biases_after(row.output_count)
            words[HOLDING * size + place] = holding
            words[POSITION * size + place] = row.offset
            words[FRESH * size + place] = self._fresh(row) if row.count == 1 else -1
            temperature = 0.0 if state.greedy else params.temperature
            floats[TEMPERATURE * size + place] = temperature
            if temperature > 0:
                sampled = True
                on_k, on_p = params.top_k < self._vocab_size, params.top_p < 1
                by_k, by_p = by_k or on_k, by_p or on_p
                words[TOP_K * size + place] = params.top_k if on_k else 0
                floats[TOP_P * size + place] = params.top_p if on_p else 1.0
                floats[MIN_P * size + place] = params.min_p
                words[OUTPUT * size + place] = row.output_count
                words[INDEX * size + place] = row.sampling.index
                seed = struct.unpack("<2i", struct.pack("<Q", row.sampling.seed))
                start = SEED * size + 2 * place
                words[start], words[start + 1] = seed
        for place in range(len(rows), batch):
            words[SLOT * size + place] = -1
            words[POSITION * size + place] = words[FRESH * size + place] = 0
            floats[TEMPERATURE * size + place] = 0.0
        reach = self.program.reach(max(row.offset for row in rows))
        return Form(batch, sampled, (by_k, by_p), edited, reach)

    def _write_tables(self, ticket: _Ticket) -> list[int]:
        """Bring block tables up to date; the slot of each row."""
        slots = []
        for number, row in enumerate(ticket.rows):
            slot = self._slot(row, ticket.rows)
            slots.append(slot)
            held = self._held.get(slot)
            if held is row.block_tables:
                continue
            self._held[slot] = tables = tuple(row.block_tables)
            start = 0
            for group, table in enumerate(tables):
                old = held[group] if held is not None else ()
                rings = self.program.rings[group]
                if rings is not None and len(old) != len(table):
                    rings[slot : slot + 1].fill_(len(table))
                low = next(
                    (i for i, block in enumerate(table) if i >= len(old) or old[i] != block),
                    len(table),
                )
                if low < len(table):
                    count = len(table) - low
                    place = ticket.buffers.tables[number, start : start + count]
                    place.numpy()[:] = table[low:]
                    self.program.tables[group][slot, low : low + count].copy_(
                        place, non_blocking=True
                    )
                    start += count
        return slots

    def _slot(self, row: Row, rows: Sequence[Row]) -> int:
        slot = self._slot_of.get(row.sequence_id)
        if slot is None:
            if not self._free_slots:
                # A preempted sequence has one that it does not use now.
                running = {row.sequence_id for row in rows}
                running |= {row.sequence_id for each in self._outstanding for row in each.rows}
                self._free_slot(next(each for each in self._slot_of if each not in running))
            slot = self._slot_of[row.sequence_id] = self._free_slots.pop()
            # All of it anew: another sequence had the slot, and may have a step under way still.
            if self._state(row).ever_edits and self._host_reason(row) is None:
                self.program.make_edits().put(slot, self._state(row))
        return slot

    def _free_slot(self, sequence_id: int) -> None:
        slot = self._slot_of.pop(sequence_id, None)
        if slot is not None:
            self._held.pop(slot, None)
            self._free_slots.append(slot)

    def _forget(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)
        self._free_slot(sequence_id)

    def _next_buffers(self) -> _Buffers:
        buffers = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        if buffers.event is not None:
            buffers.event.synchronize()  # three steps ago: done unless something is very slow
        return buffers

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
