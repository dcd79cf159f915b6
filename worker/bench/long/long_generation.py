"""One uninterrupted generation with a clock: pauses for plain decoding in between do not count.

Its drafter counts what it reuses meanwhile."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from pathlib import Path

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_engine import BenchEngine, digest
from swiftbatch.worker.bench.bench_variants import create_bench_drafter
from swiftbatch.worker.bench.decode_bench import read_tokens
from swiftbatch.worker.bench.long.long_figures import LongFigures, LongRecord, LongResult, Mark
from swiftbatch.worker.bench.long.plain_windows import PlainWindows
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.session.diversity import distinct
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

METERED = dict.fromkeys(("tokenswift", "tokenswift-paper"), "papers.tokenswift.tables.ablation")


class LongGeneration:
    """A prompt in the cache and what the engine says behind it. Marks and records are taken at pauses."""

    def __init__(
        self,
        name: str,
        target: TargetModel,
        drafter: Drafter,
        prompt_ids: list[int],
        sampling: SamplingParams,
        reuse: ReuseTally | None,
    ) -> None:
        """`reuse` is what the drafter's n-grams bring, where it has some."""
        self._name = name
        self._drafter = drafter
        self._reuse = reuse
        self._num_draft_depth = 0
        self.sequence = Sequence("long", prompt_ids, sampling, target.vocab_size, target.device)
        self.cache = target.new_cache(self.sequence.max_length)
        started = time.perf_counter()
        read_tokens(target, self.cache, prompt_ids, [drafter])
        self._read_seconds = time.perf_counter() - started
        self._engine = BenchEngine(target, drafter)
        started = time.perf_counter()
        self._engine.start(self.sequence, self.cache)
        self.seconds = time.perf_counter() - started  # so far, pauses left out
        self._marks: list[Mark] = []
        self._recorded: list[Mark] = []
        self._records: list[LongRecord] = []

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_generated_tokens

    def run_to(self, num_tokens: int) -> None:
        """Generate until there are at least `num_tokens` tokens, and mark it."""
        started = time.perf_counter()
        while self.num_tokens < num_tokens:
            for _, verification in self._engine.step():  # ends with its tokens on the host: clocks are right on a GPU
                self._num_draft_depth += max(verification.tree.depths(), default=0)
        self.seconds += time.perf_counter() - started
        self._marks.append(self._mark())

    def record(self, plain: PlainWindows) -> LongRecord:
        """Figures since the record before and since the start."""
        start = self._marks[0]
        before, now = (self._recorded or [start])[-1], self._marks[-1]
        self._recorded.append(now)
        self._records.append(
            LongRecord(
                num_tokens=now.num_tokens,
                window=LongFigures.between(before, now, plain),
                total=LongFigures.between(start, now, plain),
                distinct=distinct(self.sequence.output_ids),
            )
        )
        return self._records[-1]

    def result(self, plain: PlainWindows) -> LongResult:
        output_ids = self.sequence.output_ids
        return LongResult(
            engine=self._name,
            num_tokens=len(output_ids),
            prefill_seconds=round(self._read_seconds, 3),
            tokens_sha256=digest(output_ids),
            records=self._records,
            plain_windows=plain.compared(output_ids),
            marks=self._marks,
            plain_seconds=[round(plain.seconds(0, mark.num_tokens), 3) for mark in self._marks],
        )

    def _mark(self) -> Mark:
        counters, draft = self._engine.counters, self._drafter.counters
        return Mark(
            num_tokens=self.num_tokens,
            seconds=self.seconds,
            num_steps=counters.num_steps,
            num_accepted_tokens=counters.num_accepted_tokens,
            num_draft_depth=self._num_draft_depth,
            num_ngram_accepted_tokens=self._reuse.num_accepted_tokens if self._reuse else None,
            num_rounds=draft.num_rounds,
            step_seconds=dict(counters.step_seconds),
            draft_seconds=dict(draft.seconds),
        )


@dataclass
class ReuseTally:
    """The gain of reused n-grams so far."""

    num_accepted_tokens: int = 0  # that they alone proposed


def metered_drafter(
    engine: str, target: TargetModel, costs: Costs, parts_folder: Path | None
) -> tuple[Drafter, ReuseTally | None]:
    """An engine's drafter, and what its n-grams bring; None for one that reuses none. Raises ModelError."""
    if engine not in METERED:
        return create_bench_drafter(engine, target, costs, parts_folder), None
    module = importlib.import_module(f"swiftbatch.worker.{METERED[engine]}")
    drafter, tally = module.metered_drafter(engine, target, costs, parts_folder)
    return drafter, tally
