"""Random arrivals, lengths, cancellations and pools against what must always hold.

What is checked around every step is in `Engine` (order of admission, victims, decodes that must
advance, chunk totals) and in `FakeRunner` (every block a row sees has the right contents).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.scheduler.request import Request
from tests.fake_runner import Engine, random_prompt

LONGEST_PROMPT = 30


@dataclass(frozen=True)
class Setup:
    """An engine's shape."""

    windows: tuple[int | None, ...]
    capacity: tuple[int, ...]
    block_tokens: int
    chunk: int
    max_seqs: int
    context_length: int
    prefix_cache: bool
    grants: tuple[int, ...] | None

    def engine(self, ahead: bool) -> Engine:
        return Engine(
            windows=self.windows,
            capacity=self.capacity,
            block_tokens=self.block_tokens,
            chunk=self.chunk,
            max_seqs=self.max_seqs,
            context_length=self.context_length,
            prefix_cache=self.prefix_cache,
            grants=self.grants,
            ahead=ahead,
        )


@st.composite
def setups(draw: st.DrawFn, *, refusing: bool) -> Setup:
    """Pools from too small for one request to large enough for all."""
    windows = draw(
        st.sampled_from([(None,), (None,), (None, 5), (6,), (None, 3, 9), (1, None), (None, 16)])
    )
    capacity = tuple(draw(st.integers(3, 50)) for _ in windows)
    grants = None
    if refusing and draw(st.booleans()):
        grants = tuple(draw(st.integers(1, blocks)) for blocks in capacity)
    return Setup(
        windows,
        capacity,
        draw(st.sampled_from([1, 2, 4, 5])),
        draw(st.sampled_from([1, 3, 8, 16])),
        draw(st.integers(1, 6)),
        draw(st.integers(8, 60)),
        draw(st.booleans()),
        grants,
    )


@dataclass(frozen=True)
class Arrival:
    """A request, and how many steps go by before the next thing happens."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    seed: int
    priority: int
    salt: bytes
    prefix_cache: bool
    scores: bool
    steps: int
    cancels: int | None  # which of the open requests is cancelled then


@st.composite
def arrivals(draw: st.DrawFn, *, cancels: bool) -> Arrival:
    rng = random.Random(draw(st.integers(0, 1 << 16)))
    return Arrival(
        tuple(random_prompt(rng, LONGEST_PROMPT)),
        rng.randint(1, 20),
        rng.choice([1, 1, 1, 2, 3]),
        rng.randrange(3),
        rng.choice([0, 0, 0, 1]),
        rng.choice([b"", b"", b"other"]),
        rng.random() > 0.1,
        rng.random() < 0.1,
        draw(st.integers(0, 6)),
        draw(st.none() | st.integers(0, 7)) if cancels else None,
    )


def arrive(engine: Engine, arrival: Arrival) -> Request | None:
    """Add it if it can ever run; otherwise see that nothing of it stays."""
    n = min(arrival.n, engine.scheduler.max_seqs)
    capacity = engine.cache.capacity_tokens
    room = engine.scheduler.context_length - 1
    size = min(len(arrival.prompt), room if capacity is None else min(room, capacity))
    return engine.request(
        arrival.prompt[:size],
        arrival.max_tokens,
        seed=arrival.seed,
        priority=arrival.priority,
        salt=arrival.salt,
        prefix_cache=arrival.prefix_cache,
        n=n,
        prompt_logprobs=0 if arrival.scores else None,
    )


def verify(engine: Engine, request: Request, *, refusing: bool = False) -> None:
    """Its tokens are those it gets alone, and it ended where it had to."""
    assert request.done
    for sequence in request.sequences:
        if sequence.error is not None:
            assert refusing
            continue
        complete = engine.expected(sequence, sequence.limit - len(request.prompt_ids))
        if refusing and sequence.finish_reason == "length":
            complete = complete[: len(sequence.output_ids)]
        assert sequence.output_ids == complete
        emitted = [
            e.token for e in engine.emissions if e.sequence is sequence and e.token is not None
        ]
        assert emitted == complete, "a token is lost or doubled"
        ends = [e for e in engine.emissions if e.sequence is sequence and e.finished]
        assert len(ends) == 1
    if request.params.prompt_logprobs is not None and not refusing:
        scores = [
            score.token_id
            for e in engine.emissions
            if e.sequence.request is request
            for score in e.prompt_logprobs
        ]
        assert scores == list(request.prompt_ids[1:])


def bound(engine: Engine, requests: list[Request]) -> int:
    """Steps that suffice even if everything ran one after another and was recomputed often."""
    work = sum(
        (len(r.prompt_ids) / engine.policy.maximum + s.limit - len(r.prompt_ids) + 3)
        * (1 + s.epoch)
        for r in requests
        for s in r.sequences
    )
    return 10 + round(work) * 2


def live_through(engine: Engine, script: list[Arrival]) -> list[Request]:
    """Play the arrivals and let everything end; returns the requests nobody cancelled."""
    for arrival in script:
        arrive(engine, arrival)
        for _ in range(arrival.steps):
            engine.step()
            engine.scheduler.check()
        unfinished = [request for request in engine.requests if not request.done]
        if arrival.cancels is not None and unfinished:
            engine.cancel(unfinished[arrival.cancels % len(unfinished)])
            engine.scheduler.check()
    steps = engine.run(5000)
    assert steps <= bound(engine, engine.requests), "someone starved"
    assert engine.scheduler.resumed <= engine.scheduler.preempted
    return engine.requests


FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(
    setups(refusing=True), st.lists(arrivals(cancels=True), min_size=3, max_size=20), st.booleans()
)
def test_no_block_is_lost_and_every_request_ends_as_it_should(
    setup: Setup, script: list[Arrival], ahead: bool
) -> None:
    engine = setup.engine(ahead)
    for request in live_through(engine, script):
        verify(engine, request, refusing=setup.grants is not None)


@FUZZ
@given(setups(refusing=False), st.lists(arrivals(cancels=False), min_size=3, max_size=16))
def test_one_step_ahead_gives_the_tokens_of_the_synchronous_order(
    setup: Setup, script: list[Arrival]
) -> None:
    outcomes = []
    for ahead in (False, True):
        engine = setup.engine(ahead)
        requests = live_through(engine, script)
        for request in requests:
            verify(engine, request)
        outcomes.append(
            [
                (sequence.output_ids, sequence.finish_reason, sequence.stop)
                for request in requests
                for sequence in request.sequences
            ]
        )
    assert outcomes[0] == outcomes[1]


def test_an_hour_of_arrivals_and_cancellations_loses_nothing() -> None:
    """10,000 operations on one engine: arrivals, steps, cancellations in every state."""
    rng = random.Random(20261130)
    engine = Engine(
        windows=(None, 6),
        capacity=(30, 60),
        block_tokens=4,
        chunk=16,
        max_seqs=8,
        context_length=100,
        ahead=True,
    )
    scheduler = engine.scheduler
    arrived_at: dict[Request, int] = {}
    waited = cancelled = 0
    for operation in range(10_000):
        kind = rng.random()
        if kind < 0.12 and len(engine.requests) < 24:
            prompt = random_prompt(rng, LONGEST_PROMPT)
            request = engine.request(
                prompt, rng.randint(1, 30), n=rng.choice([1, 1, 1, 3]), seed=rng.randrange(9)
            )
            arrived_at[request] = scheduler.steps
        elif kind < 0.16 and engine.requests:
            cancelled += len(engine.cancel(rng.choice(engine.requests)))
        else:
            engine.step()
        if operation % 10 == 0:
            scheduler.check()
        for request in [request for request in engine.requests if request.done]:
            verify(engine, request)
            waited = max(waited, scheduler.steps - arrived_at[request])
            engine.requests.remove(request)
        if len(engine.emissions) > 4000:
            open_ = {sequence for request in engine.requests for sequence in request.sequences}
            engine.emissions = [e for e in engine.emissions if e.sequence in open_]
    engine.run()
    for request in engine.requests:
        verify(engine, request)
    assert waited <= 200, "with at most 24 requests open nobody waits that many steps"
    assert scheduler.cancelled == cancelled > 200
    assert scheduler.preempted > 50
    assert scheduler.resumed <= scheduler.preempted
    assert engine.cache.prefix_hit_tokens > 1000
    assert engine.runner.copies > 20
    ended = scheduler.finished + scheduler.cancelled + scheduler.failed
    assert ended >= scheduler.admitted, "every admitted sequence ended"
    assert scheduler.failed == 0
    assert scheduler.waiting == scheduler.running == 0
    assert engine.cache.blocks_used == 0
