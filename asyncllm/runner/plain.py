"""`PlainRunner`: the plain program with a choice of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from asyncllm.model.program import PlainProgram
from asyncllm.runner.runner import LOGITS_ROWS, StepRunner
from asyncllm.runner.threads import set_threads

if TYPE_CHECKING:
    from asyncllm.kv.pool import KvPool
    from asyncllm.model.causal_lm import CausalLM
    from asyncllm.scheduler.step import StepPlan, StepResult

# A pass of up to so many rows is made of operations so small that threads may cost more than they
# give: dearly where another process holds a core they wait for.
FEW_ROWS: Final = 16
WORTH_THREADS: Final = 0.75  # of one thread's time: less would not be worth that risk


class PlainRunner(StepRunner):
    """The floor: every model, every format, no compilation.

    Args:
        model: bound weights.
        pool: where K and V are; closed with the runner.
        vocab_size: tokens that may be chosen; the embedding may have more rows, as padding.
        max_rows: rows of a step at most, over all sequences.
        threads: CPU threads of a pass. The bits of a result do not depend on them.
        should_stop: asked between layers; when it says so the step ends with `StepInterrupted`.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        *,
        vocab_size: int,
        max_rows: int,
        threads: int = 1,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.threads = threads
        self.few_rows_threads = threads
        self.program = PlainProgram(
            model, pool, max_rows=max_rows, max_logits=LOGITS_ROWS, should_stop=should_stop
        )
        super().__init__(self.program, pool, vocab_size=vocab_size, name="the plain runner")

    def run(self, plan: StepPlan) -> StepResult:
        """Do a step."""
        few = sum(row.count for row in plan.rows) <= FEW_ROWS
        set_threads(self.few_rows_threads if few else self.threads)
        return super().run(plan)

    def tune(self, plan: StepPlan) -> None:
        """Choose the threads of passes with few rows, by timing a decode step again and again."""
        if self.threads == 1:
            return
        seconds: dict[int, float] = {}
        for _ in range(2):
            for threads in (1, self.threads):
                self.few_rows_threads = threads
                taken = self.run(plan).model_s
                seconds[threads] = min(seconds.get(threads, taken), taken)
        gains = seconds[self.threads] < WORTH_THREADS * seconds[1]
        self.few_rows_threads = self.threads if gains else 1
