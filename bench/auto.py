"""Loss of `auto` against the best single engine, over a grid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from bench.options import Engines, Floats, Ints
from bench.tables import Record, only
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker import decode_bench
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import (
    BY_NAME,
    BenchEngine,
    BenchError,
    BenchOptions,
    Contestant,
    bench_slots,
    check_length,
    compete,
    read_tokens,
    text_tokens,
    warm_drafters,
)
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.step_costs import Costs, seconds_now, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence

BASELINE, CHOOSER = "autoregressive", "auto"
TWIN = "autoregressive again"  # plain decoding again: measures the machine's noise in a ratio
COLUMNS = (
    *("position", "temperature", "num_sequences", "num_tokens", "plain_tokens_per_second", "auto_to_plain"),
    *("best_other", "auto_to_best", "twin_to_plain", "same_tokens"),
)
ROOM = 2  # times the requested tokens, so that no sequence of a batch ends early
CELL_TOKENS = 2048  # least tokens per slot: short jobs follow each other, as on a worker
ROUND_TOKENS = 50  # least tokens of a turn, because machines change speed


class Options(BenchOptions):
    """The grid; `auto` and plain decoding always run."""

    text: Path
    engines: Engines = tuple(name for name in ENGINES if name not in (Computation.engine, BASELINE))
    positions: Ints = (4096,)
    slots: Ints = (1, 4, 8)  # sequences per step
    num_tokens: Ints = (256,)  # per job
    num_repetitions: int = 1  # of each cell, with fresh drafters and other seeds
    temperatures: Floats = (1.0,)
    min_p: float = 0.1
    seed: int = 0
    kv_offload: Path | None = None  # folder of caches outside the device
    processor_time: bool = False  # measures, and steers `auto` by, CPU time instead of elapsed time

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((BASELINE, CHOOSER, *self.engines)))


def run(options: Options) -> Iterator[Record]:
    """Compare the engine `auto` with plain decoding and the best single engine, at every point of a grid.

    All generate the same tokens in turn, at least 2,048 in every slot: short jobs follow each other, as on a worker.
    The time to start a job counts, and what an engine learns in one job helps it in the next. With --processor-time
    and --threads 1 other programs add little to the figures.

    \b
    Example:
      python -m bench auto --positions 2048,16384 --slots 1,8 --temperatures 0.6,1.0 --text book.txt --json auto.jsonl
    """
    if options.processor_time and (options.num_threads > 1 or options.device == "cuda"):
        raise BenchError("processor time is that of one thread; use it with --threads 1, on a CPU")
    files, highest, most_tokens = locate_model(options.model), max(options.positions), ROOM * max(options.num_tokens)
    check_length(files, highest, most_tokens)
    longest = max(highest + most_tokens, min(decode_bench.NUM_WARMUP_TOKENS, files.max_positions // 2))
    slots = bench_slots(options.contestants, longest, max(options.slots), files)
    target = options.load(files, slots, options.kv_offload)
    text = text_tokens(options.text, files, highest)
    clock = SimpleNamespace(perf_counter=time.thread_time if options.processor_time else time.perf_counter)
    with mock.patch.object(step_costs, "time", clock):  # drafters, too, then count processor time
        yield from _Grid(target, options, text).records()


def shown(records: list[Record], options: Options) -> list[Record]:
    """Return each cell's worst repetition."""
    cells: dict[tuple[object, ...], Record] = {}
    for each in records:
        place = tuple(each[name] for name in ("position", "temperature", "num_sequences", "num_tokens"))
        cells[place] = min(cells.get(place, each), each, key=lambda record: float(record["auto_to_best"]))
    if not records:
        return []
    least = {name: min(each[name] for each in records) for name in ("auto_to_best", "auto_to_plain", "twin_to_plain")}
    words = "auto at worst: {auto_to_best:.2f}x of the best other engine, {auto_to_plain:.2f}x of plain decoding; "
    words += "plain decoding beside itself: {twin_to_plain:.2f}x"
    return [*only(cells.values(), COLUMNS), {"words": words.format(**least)}]


@dataclass(frozen=True)
class _Cell:
    position: int
    num_sequences: int
    temperature: float
    num_tokens: int
    repetition: int

    @property
    def num_jobs(self) -> int:
        return -(-CELL_TOKENS // self.num_tokens)


class _Grid:
    """One cache per sequence, on which engines take turns."""

    def __init__(self, target: TargetModel, options: Options, text: list[int]) -> None:
        self._target, self._options, self._text = target, options, text
        self._costs: Costs = step_costs_of(target)
        self._drafters = warm_drafters(target, self._costs, options.contestants, None)
        room = len(text) + ROOM * max(options.num_tokens)
        self._caches = [target.new_cache(room) for _ in range(max(options.slots))]

    def records(self) -> Iterator[Record]:
        """Yield records position by position, so that a text is read once."""
        options = self._options
        for position in sorted(options.positions):
            first, *others = self._caches
            read_tokens(self._target, first, self._text[:position], list(self._drafters.values()))
            for cache in others:
                cache.load(first.kv(cache.length, first.length))
            places = product(options.slots, options.temperatures, options.num_tokens)
            for place, repetition in product(places, range(options.num_repetitions)):
                yield self._record(_Cell(position, *place, repetition))

    def _record(self, cell: _Cell) -> Record:
        contestants = {name: self._contestant(name, cell) for name in (*self._options.contestants, TWIN)}
        num_tokens, seconds, has_same_tokens = dict.fromkeys(contestants, 0), dict.fromkeys(contestants, 0.0), True
        for job in range(cell.num_jobs):
            for name, contestant in contestants.items() if job else ():
                seconds[name] += self._go_on(contestant, self._sequences(name, cell, job))
            compete(list(contestants.values()), cell.num_tokens, max(1, cell.num_tokens // ROUND_TOKENS), first=job)
            found = [[each.output_ids[: cell.num_tokens] for each in c.sequences] for c in contestants.values()]
            has_same_tokens &= all(np.array_equal(each, found[0]) for each in found)
            for name, contestant in contestants.items():
                num_tokens[name] += len(contestant.token_ids())
        for cache in self._caches[: cell.num_sequences]:
            cache.roll_back(cell.position - 1)
        for name, contestant in contestants.items():
            seconds[name] += sum(taken for taken, _ in contestant.rounds)
        return _figures(cell, {name: num_tokens[name] / seconds[name] for name in contestants}, has_same_tokens)

    def _go_on(self, contestant: Contestant, sequences: list[Sequence]) -> float:
        started = seconds_now()
        for sequence in contestant.sequences:
            contestant.engine.stop(sequence)
        for cache, first in zip(contestant.caches, contestant.firsts, strict=True):
            cache.roll_back(min(cache.length, first))
        contestant.start(sequences)
        return seconds_now() - started

    def _contestant(self, name: str, cell: _Cell) -> Contestant:
        engine = BASELINE if name == TWIN else name
        drafter = BY_NAME[engine](self._target, self._costs, None)
        sequences, caches = self._sequences(name, cell, job=0), self._caches[: cell.num_sequences]
        contestant = Contestant(name, BenchEngine(self._target, drafter), sequences, caches)
        for sequence in sequences:
            if state := self._drafters[engine].state(sequence):
                drafter.restore(sequence, state)
        return contestant

    def _sequences(self, name: str, cell: _Cell, job: int) -> list[Sequence]:
        """Return jobs that no other repetition or slot has."""
        target, sequences, text = self._target, [], self._text[: cell.position]
        most = cell.num_tokens if cell.num_sequences == 1 else ROOM * cell.num_tokens
        sampled = SamplingParams(
            max_tokens=most, temperature=cell.temperature, min_p=self._options.min_p, ignore_eos=True
        )
        for slot in range(cell.num_sequences):
            number = (cell.repetition * cell.num_jobs + job) * cell.num_sequences + slot
            sampling = sampled.model_copy(update={"seed": self._options.seed + number})
            sequences.append(Sequence(f"{name}-{number}", text, sampling, target.vocab_size, target.device))
        return sequences


def _figures(cell: _Cell, speeds: dict[str, float], has_same_tokens: bool) -> Record:
    """Return total speed by engine and the comparison."""
    best = max((name for name in speeds if name not in (CHOOSER, TWIN)), key=speeds.__getitem__)
    return {
        "position": cell.position,
        "temperature": cell.temperature,
        "num_sequences": cell.num_sequences,
        "num_tokens": cell.num_tokens,
        "repetition": cell.repetition,
        "plain_tokens_per_second": speeds[BASELINE],
        "auto_to_plain": speeds[CHOOSER] / speeds[BASELINE],
        "best_other": best,
        "auto_to_best": speeds[CHOOSER] / speeds[best],
        "twin_to_plain": speeds[TWIN] / speeds[BASELINE],
        "tokens_per_second": speeds,
        "same_tokens": has_same_tokens,
    }
