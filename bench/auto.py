"""`python -m bench auto`: what the engine that chooses loses against the best single one, over a grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, field_validator, model_validator
from rich.table import Table

from bench.tables import new_table
from bench.variants import Temperatures, create_bench_drafter
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.bench_texts import text_tokens
from swiftbatch.worker.decode_bench import (
    BenchOptions,
    EngineContestant,
    OwnPositions,
    Positions,
    bench_slots,
    check_length,
    compete,
    num_warmup_tokens,
    read_tokens,
    warm_drafters,
)
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.forward.step_costs import Costs, by_processor, seconds_now, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence

BASELINE, CHOOSER = "autoregressive", "auto"
TWIN = "autoregressive again"  # plain decoding beside itself: what the machine's own wandering makes of a ratio


class AutoRecord(Frozen):
    """One repetition of a cell of the grid: the speed of all engines there."""

    position: int
    temperature: float
    num_sequences: int
    num_tokens: int  # of each job
    repetition: int
    tokens_per_second: dict[str, float]  # of all sequences together, by engine
    has_same_tokens: bool

    @property
    def best(self) -> str:
        """The fastest engine beside the one that chooses."""
        others = (name for name in self.tokens_per_second if name not in (CHOOSER, TWIN))
        return max(others, key=self.tokens_per_second.__getitem__)

    def ratio(self, engine: str, to: str) -> float:
        """The speed of one engine beside that of another."""
        return self.tokens_per_second[engine] / self.tokens_per_second[to]


def render(records: Items[AutoRecord]) -> Table:
    """A table for people: what `auto` makes of plain decoding, and of the engine that is best in a cell.

    Of several repetitions of a cell it has the one where `auto` is worst beside the best other engine. Its
    last line has the worst that plain decoding was beside itself: no ratio can be told from 1 more finely than that.
    """
    headers = (
        "position",
        "T",
        "jobs",
        "tokens\na job",
        "plain\ntok/s",
        "auto\nto\nplain",
        "best other",
        "its\nto\nplain",
        "auto\nto\nbest",
    )
    table = new_table("", (), headers)
    table.add_column("same")
    for repetitions in _cells(records):
        record = min(repetitions, key=lambda each: each.ratio(CHOOSER, each.best))
        table.add_row(
            str(record.position),
            f"{record.temperature:g}",
            str(record.num_sequences),
            str(record.num_tokens),
            f"{record.tokens_per_second[BASELINE]:.0f}",
            f"{min(each.ratio(CHOOSER, BASELINE) for each in repetitions):.2f}x",
            record.best,
            f"{record.ratio(record.best, BASELINE):.2f}x",
            f"{record.ratio(CHOOSER, record.best):.2f}x",
            "yes" if all(each.has_same_tokens for each in repetitions) else "no",
        )
    if records:
        worst = min(record.ratio(CHOOSER, record.best) for record in records)
        least = min(record.ratio(CHOOSER, BASELINE) for record in records)
        table.caption = f"auto at worst: {worst:.2f}x of the best other engine, {least:.2f}x of plain decoding"
        table.caption += _worst_of_twins(records)
    return table


def _worst_of_twins(records: Items[AutoRecord]) -> str:
    """Say the least ratio of two equal contestants, which figures of former versions do not have."""
    twins = [each.ratio(TWIN, BASELINE) for each in records if TWIN in each.tokens_per_second]
    return f"; plain decoding beside itself: {min(twins):.2f}x" if twins else ""


def _cells(records: Items[AutoRecord]) -> list[list[AutoRecord]]:
    """The repetitions of every cell, in the order that they came in."""
    cells: dict[tuple[object, ...], list[AutoRecord]] = {}
    for record in records:
        place = (record.position, record.temperature, record.num_sequences, record.num_tokens)
        cells.setdefault(place, []).append(record)
    return list(cells.values())


MOST_SEQUENCES = 32
ROOM = 2  # times the tokens that are asked for: no sequence of a batch ends before the others are there
CELL_TOKENS = 2048  # least tokens of a slot: short jobs follow each other, as on a worker
FEWEST_TOKENS = 5  # of a job
ROUND_TOKENS = 50  # least tokens of a job before another contestant takes its turn: machines change their speed


def _counts(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or not all(1 <= each <= MOST_SEQUENCES for each in numbers):
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected numbers from 1 to {MOST_SEQUENCES}")
    return tuple(sorted(set(numbers)))


Counts = Annotated[tuple[int, ...], AfterValidator(_counts)]


def _lengths(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or min(numbers) < FEWEST_TOKENS:
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected numbers of {FEWEST_TOKENS} or more")
    return tuple(sorted(set(numbers)))


Lengths = Annotated[tuple[int, ...], AfterValidator(_lengths)]


class AutoBenchOptions(BenchOptions):
    """The grid: every one of `positions`, `slot_counts`, `temperatures` and `num_tokens`.

    Plain decoding and `auto` always run, plain decoding twice.
    """

    engines: tuple[str, ...]  # that are compared beside those two
    positions: Positions
    slot_counts: Counts  # sequences of a step
    temperatures: Temperatures
    num_tokens: Lengths  # of each job
    num_repetitions: int = Field(ge=1)  # of every cell, with fresh drafters and other seeds
    min_p: float = Field(ge=0.0, le=1.0)
    seed: int = Field(ge=0)
    text: Path
    kv_offload: Path | None = None  # folder of caches outside the device
    processor_time: bool = False  # in place of the time that passes, also for what `auto` goes by

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in engines if name not in ENGINES]
        if unknown or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines)}; expected some of: {', '.join(ENGINES)}, each once")
        return engines

    @model_validator(mode="after")
    def _counts_all_work(self) -> AutoBenchOptions:
        if self.processor_time and (self.num_threads > 1 or self.device == "cuda"):
            raise ValueError("processor time is that of one thread; use it with --threads 1, on a CPU")
        return self

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((BASELINE, CHOOSER, *self.engines)))


def run_auto_bench(options: AutoBenchOptions, report: Callable[[str], None] = lambda line: None) -> list[AutoRecord]:
    """Measure all cells; `report` gets a line about each. Raises BenchError, ModelError."""
    files, highest, most_tokens = locate_model(options.model), options.positions[-1], ROOM * options.num_tokens[-1]
    check_length(files, highest, most_tokens)
    longest = max(highest + most_tokens, num_warmup_tokens(files))
    slots = bench_slots(options.contestants, longest, options.slot_counts[-1], files)
    target = options.load(files, slots, options.kv_offload)
    text = text_tokens(options.text, files, highest)
    records: list[AutoRecord] = []
    with by_processor() if options.processor_time else contextlib.nullcontext():
        for record in _Grid(target, options, text).records(report):
            records.append(record)
            options.write({"results": [each.model_dump() for each in records]}, target)
    return records


class JobsContestant(EngineContestant):
    """A contestant that has other jobs behind its first ones."""

    _num_tokens_before = 0  # of jobs that it has left

    def go_on_with(self, sequences: list[Sequence]) -> None:
        """Leave the jobs for others behind the same text, with all that the drafter has learned.

        The time to leave a job and to begin one counts, as a worker needs it for every job.
        """
        self._num_tokens_before = self.num_tokens
        started = seconds_now()
        for sequence in self._sequences:
            self._engine.stop(sequence)
        self._own = [_emptied(own) for own in self._own]
        for sequence, own in zip(sequences, self._own, strict=True):
            self._engine.start(sequence, own.cache)
        self._sequences = sequences
        self.timing.seconds += seconds_now() - started

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all jobs so far."""
        return self._num_tokens_before + sum(sequence.num_generated_tokens for sequence in self._sequences)

    def first_token_ids(self, num_tokens: int) -> list[np.ndarray]:
        """Return the first tokens of every sequence, as many as all contestants have."""
        return [sequence.output_ids[:num_tokens] for sequence in self._sequences]


def _emptied(own: OwnPositions) -> OwnPositions:
    """Return the same place in a cache, for a generation that begins there; the cache ends at it."""
    own.cache.roll_back(min(own.cache.length, own.first))
    return OwnPositions(own.cache)


@dataclass(frozen=True)
class _Cell:
    """A place of the grid."""

    position: int
    num_sequences: int
    temperature: float
    num_tokens: int
    repetition: int

    @property
    def num_jobs(self) -> int:
        """Jobs of every slot, one behind the other."""
        return -(-CELL_TOKENS // self.num_tokens)

    @property
    def num_rounds(self) -> int:
        """Turns that a job is cut into: a job that is soon done is generated at once."""
        return max(1, self.num_tokens // ROUND_TOKENS)

    def __str__(self) -> str:
        place = f"position {self.position}, {self.num_sequences} at a time, temperature {self.temperature:g}"
        return f"{place}, {self.num_tokens} tokens a job, repetition {self.repetition + 1}"


class _Grid:
    """One cache for each sequence of the largest batch: the engines take turns on them."""

    def __init__(self, target: TargetModel, options: AutoBenchOptions, text: list[int]) -> None:
        self._target, self._options, self._text = target, options, text
        self._costs: Costs = step_costs_of(target)
        self._drafters = warm_drafters(target, self._costs, options.contestants, None)
        room = len(text) + ROOM * options.num_tokens[-1]
        self._caches = [target.new_cache(room) for _ in range(options.slot_counts[-1])]

    def records(self, report: Callable[[str], None]) -> Iterator[AutoRecord]:
        """Yield records cell by cell, position by position: a text is read once."""
        options = self._options
        for position in options.positions:
            report(f"position {position}: reading the text")
            self._read(position)
            places = product(options.slot_counts, options.temperatures, options.num_tokens)
            for place, repetition in product(places, range(options.num_repetitions)):
                cell = _Cell(position, *place, repetition)
                report(str(cell))
                yield self._record(cell)

    def _read(self, position: int) -> None:
        first, *others = self._caches
        read_tokens(self._target, first, self._text[:position], list(self._drafters.values()))
        for cache in others:
            cache.load(first.kv(cache.length, first.length))

    def _record(self, cell: _Cell) -> AutoRecord:
        contestants = [self._contestant(name, cell) for name in (*self._options.contestants, TWIN)]
        has_same_tokens = True
        for job in range(cell.num_jobs):
            if job:
                for contestant in contestants:
                    contestant.go_on_with(self._sequences(contestant.name, cell, job))
            compete(contestants, cell.num_tokens, cell.num_rounds, first=job)
            tokens = [np.concatenate(contestant.first_token_ids(cell.num_tokens)) for contestant in contestants]
            has_same_tokens &= all(np.array_equal(each, tokens[0]) for each in tokens)
        for cache in self._caches[: cell.num_sequences]:
            cache.roll_back(cell.position - 1)
        return AutoRecord(
            position=cell.position,
            temperature=cell.temperature,
            num_sequences=cell.num_sequences,
            num_tokens=cell.num_tokens,
            repetition=cell.repetition,
            tokens_per_second={c.name: c.num_tokens / c.timing.seconds for c in contestants},
            has_same_tokens=has_same_tokens,
        )

    def _contestant(self, name: str, cell: _Cell) -> JobsContestant:
        engine = BASELINE if name == TWIN else name
        drafter = create_bench_drafter(engine, self._target, self._costs)
        sequences, caches = self._sequences(name, cell, job=0), self._caches[: cell.num_sequences]
        contestant = JobsContestant(name, self._target, drafter, sequences, caches)
        contestant.learn_from(self._drafters[engine])
        return contestant

    def _sequences(self, name: str, cell: _Cell, job: int) -> list[Sequence]:
        """The jobs of all slots, none of which another repetition or slot has."""
        target, options, sequences = self._target, self._options, []
        for slot in range(cell.num_sequences):
            number = (cell.repetition * cell.num_jobs + job) * cell.num_sequences + slot
            sampling = SamplingParams(
                max_tokens=cell.num_tokens if cell.num_sequences == 1 else ROOM * cell.num_tokens,
                temperature=cell.temperature,
                min_p=options.min_p,
                seed=options.seed + number,
                ignore_eos=True,
            )
            text = self._text[: cell.position]
            sequences.append(Sequence(f"{name}-{number}", text, sampling, target.vocab_size, target.device))
        return sequences
