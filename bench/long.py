"""`python -m bench long`: one long generation against plain decoding, measured on the way at the same positions."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.long_figures import LongFigures, LongRecord, LongResult, Mark, PlainWindows, plot
from bench.variants import TOKENSWIFT_PAPER as PAPER
from bench.variants import EngineName, create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.bench_texts import BenchEngine, own_tokens, text_tokens
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length, digest, read_tokens
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.self_speculation.draft_chain import Chain
from swiftbatch.worker.drafters.tokenswift.tokenswift import (
    Sources,
    TokenSwiftOptions,
    TokenSwiftProposer,
    by_token,
    tokenswift,
)
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.filters import FILTERS
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification
from swiftbatch.worker.session.running_job import distinct

METERED = {"tokenswift-paper": PAPER, "tokenswift": TokenSwiftOptions()}
NOTHING = Sources([], [])


@dataclass
class _Asked:
    """The length of the text behind which a tree was asked for, and what the tree was made of."""

    start: int
    sources: Sources = NOTHING


class MeteredProposer(TokenSwiftProposer):
    """A proposer that keeps what its trees are made of until it hears which tokens were accepted."""

    def __init__(self, tally: ReuseTally, *parts: Any) -> None:
        super().__init__(*parts)
        self._tally = tally
        self._asked: dict[str, list[_Asked]] = defaultdict(list)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        for chain in chains:
            self._asked[chain.sequence.sequence_id].append(_Asked(len(chain.sequence)))
        return super().propose(chains, limits)

    def sources(self, chain: Chain) -> Sources:
        found = self._asked[chain.sequence.sequence_id][-1].sources = super().sources(chain)
        return found

    def update(self, sequence: Sequence, verification: Verification) -> None:
        end = len(sequence) - len(verification.committed_ids) + verification.num_accepted_tokens
        asked = [*self._asked.pop(sequence.sequence_id, []), _Asked(end + 1)]
        for one, later in itertools.pairwise(asked):  # the token in front of the later tree was drawn, not proposed
            path = tuple(sequence.token_ids[one.start : min(end, later.start - 1)].tolist())
            self._tally.num_accepted_tokens += sum(by_ngrams_alone(path, one.sources))
        super().update(sequence, verification)


def by_ngrams_alone(path: tuple[int, ...], sources: Sources) -> list[bool]:
    """Tell for every token of a path whether n-grams alone proposed it."""
    ngrams = [tuple(token for _, token in ngram) for ngram in sources.ngrams]
    in_digits, is_alone, found = True, False, []
    for depth, token in enumerate(path):
        in_digits = in_digits and depth < len(sources.levels) and token in by_token(sources.levels[depth])
        is_alone = is_alone or not (in_digits or token in sources.others(path[:depth]))
        is_alone = is_alone and any(ngram[: depth + 1] == path[: depth + 1] for ngram in ngrams)
        found.append(is_alone)
    return found


def metered_drafter(
    engine: str, target: TargetModel, costs: Costs, parts_folder: Path | None, options: TokenSwiftOptions | None = None
) -> tuple[Drafter, ReuseTally | None]:
    """An engine's drafter, and what its n-grams bring; None for one that reuses none. Raises ModelError.

    TokenSwift's `options` may be others than the engine's.
    """
    if engine not in METERED:
        return create_bench_drafter(engine, target, costs, parts_folder), None
    tally = ReuseTally()
    new_proposer = partial(MeteredProposer, tally)
    return tokenswift(target, costs, parts_folder, options or METERED[engine], new_proposer), tally


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


NUM_PLAIN_TOKENS = 24  # of one window

Report = Callable[[str], None]


class LongBenchOptions(BenchOptions):
    """The measurement asked for: `sampling.max_tokens` tokens behind `prefill` tokens of text.

    There is a record every `every` tokens. Every `plain_every` tokens, plain decoding generates `NUM_PLAIN_TOKENS`,
    which are counted neither as output nor in the time.
    """

    draft_model: Path | None = None
    engine: EngineName
    sampling: SamplingParams
    prefill: int = Field(ge=1)
    every: int = Field(ge=1)
    plain_every: int = Field(ge=1)
    text: Path | None = None
    plot_path: Path | None = None

    @property
    def num_tokens(self) -> int:
        return self.sampling.max_tokens

    def record_stops(self) -> list[int]:
        """Numbers of tokens at which figures are taken, ascending; the last one is the end."""
        return [*range(self.every, self.num_tokens, self.every), self.num_tokens]

    def plain_stops(self) -> list[int]:
        """Numbers of tokens at which plain decoding is timed, the last time over the last tokens."""
        last = max(0, self.num_tokens - NUM_PLAIN_TOKENS)
        grid = {*range(0, last, self.plain_every), *self.record_stops(), last}
        return sorted(stop for stop in grid if stop <= last)

    def title(self) -> str:
        sampling = self.sampling
        parts = [f"{self.engine} on {Path(self.model).name}", f"{self.prefill:,} tokens of prompt"]
        parts.append(f"T = {sampling.temperature:g}")
        if sampling.temperature > 0:
            asked = [each.field for each in FILTERS if each.is_on(sampling)]
            parts += [f"{field.replace('_', '-')} {getattr(sampling, field):g}" for field in asked]
        if sampling.repetition_penalty != 1.0:
            parts.append(f"penalty {sampling.repetition_penalty:g} over {sampling.penalty_window:,} tokens")
        return ", ".join(parts)


def run_long_bench(options: LongBenchOptions, report: Report = lambda line: None) -> LongResult:
    """Generate, and write JSON and plot at every record. `report` gets a line at each pause.

    Raises BenchError, ModelError.
    """
    files = locate_model(options.model)
    check_length(files, options.prefill, options.num_tokens)
    target = options.load(files, bench_slots([options.engine], options.prefill + options.num_tokens))
    report(f"reading {options.prefill:,} tokens, then {options.num_tokens:,} with {options.engine}")

    def save(result: LongResult) -> None:
        options.write(result.model_dump(), target)
        if options.plot_path is not None:
            plot(result, options.title(), options.plot_path)

    metered = metered_drafter(options.engine, target, step_costs_of(target), options.draft_model)
    return generate_long(options, target, *metered, report, save)


def generate_long(
    options: LongBenchOptions,
    target: TargetModel,
    drafter: Drafter,
    reuse: ReuseTally | None,
    report: Report,
    save: Callable[[LongResult], None] = lambda result: None,
) -> LongResult:
    """Generate with a given drafter, whose n-grams bring `reuse`; `save` gets the figures so far at every record.

    Raises BenchError.
    """
    generation = LongGeneration(options.engine, target, drafter, _prompt(options, target), options.sampling, reuse)
    plain = PlainWindows(target, NUM_PLAIN_TOKENS)
    plain_stops, record_stops = set(options.plain_stops()), set(options.record_stops())
    num_recorded = 0
    for stop in sorted(plain_stops | record_stops):
        generation.run_to(stop)
        if stop in plain_stops:
            plain.measure(generation.sequence, generation.cache)
        num_tokens = generation.num_tokens
        if stop in record_stops and num_tokens > num_recorded:  # a step may have run past two stops
            num_recorded = num_tokens
            report(record_line(generation.record(plain)))
            save(generation.result(plain))
        elif stop:
            report(f"{num_tokens:,} of {options.num_tokens:,} tokens in {generation.seconds / 60:.1f} min")
    return generation.result(plain)


def record_line(record: LongRecord) -> str:
    total, alpha = record.total, record.total.alpha
    return (
        f"{record.num_tokens:,} tokens in {total.seconds / 60:.1f} min, plain decoding {total.plain_seconds / 60:.1f} "
        f"min: {total.speedup:.2f}x ({record.window.speedup:.2f}x in the latest window), "
        f"alpha {'-' if alpha is None else f'{alpha:.2f}'}"
    )


def _prompt(options: LongBenchOptions, target: TargetModel) -> list[int]:
    if options.text is None:
        return own_tokens(target, options.prefill)
    return text_tokens(options.text, target.files, options.prefill)
