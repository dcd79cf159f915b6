"""`swiftbatch bench auto`: what the engine that chooses loses against the best single one, over a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, field_validator

from jobs.sampling import SamplingParams
from worker.bench.auto.records import BASELINE, CHOOSER, AutoRecord
from worker.bench.decode.contestants import EngineContestant
from worker.bench.decode.decode import (
    NUM_ROUNDS,
    compete,
    hot_contestant,
    num_warmup_tokens,
    read_tokens,
    warm_drafters,
)
from worker.bench.options import BenchOptions, Positions, Temperatures, check_length
from worker.bench.text import text_tokens
from worker.bench.variants import bench_slots, create_bench_drafter
from worker.caches.full import FullKVCache
from worker.drafters.base import Drafter
from worker.drafters.catalogue import ENGINES
from worker.model.files import locate_model
from worker.sequence import Sequence
from worker.target.step_costs import Costs, step_costs_of
from worker.target.target import TargetModel

MOST_SEQUENCES = 32
ROOM = 2  # times the tokens that are asked for: no sequence of a batch ends before the others are there


def _counts(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or not all(1 <= each <= MOST_SEQUENCES for each in numbers):
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected numbers from 1 to {MOST_SEQUENCES}")
    return tuple(sorted(set(numbers)))


Counts = Annotated[tuple[int, ...], AfterValidator(_counts)]


class AutoBenchOptions(BenchOptions):
    """The grid: every one of `positions`, `slot_counts` and `temperatures`; plain decoding and `auto` always run."""

    engines: tuple[str, ...]  # that are compared beside those two
    positions: Positions
    slot_counts: Counts  # sequences of a step
    temperatures: Temperatures
    num_tokens: int = Field(ge=NUM_ROUNDS)  # of each sequence
    min_p: float = Field(ge=0.0, le=1.0)
    seed: int = Field(ge=0)
    text: Path
    kv_offload: Path | None = None  # folder of caches outside the device

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in engines if name not in ENGINES]
        if unknown or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines)}; expected some of: {', '.join(ENGINES)}, each once")
        return engines

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((BASELINE, CHOOSER, *self.engines)))


def run_auto_bench(options: AutoBenchOptions, report: Callable[[str], None] = lambda line: None) -> list[AutoRecord]:
    """Measure all cells; `report` gets a line about each. Raises BenchError, ModelError."""
    files, highest = locate_model(options.model), options.positions[-1]
    check_length(files, highest, ROOM * options.num_tokens)
    longest = max(highest + ROOM * options.num_tokens, num_warmup_tokens(files))
    slots = bench_slots(options.contestants, longest, options.slot_counts[-1])
    target = options.load(files, slots, options.kv_offload)
    text = text_tokens(options.text, files, highest)
    records: list[AutoRecord] = []
    for record in _Grid(target, options, text).records(report):
        records.append(record)
        options.write({"results": [each.model_dump() for each in records]}, target)
    return records


class _Grid:
    """One cache for each sequence of the largest batch: the engines take turns on them."""

    def __init__(self, target: TargetModel, options: AutoBenchOptions, text: list[int]) -> None:
        self._target, self._options, self._text = target, options, text
        self._costs: Costs = step_costs_of(target)
        self._drafters = warm_drafters(target, self._costs, options.contestants, None)
        room = len(text) + ROOM * options.num_tokens
        self._caches = [target.new_cache(room) for _ in range(options.slot_counts[-1])]

    def records(self, report: Callable[[str], None]) -> Iterator[AutoRecord]:
        """Cell by cell, position by position: a text is read once."""
        for position in self._options.positions:
            report(f"position {position}: reading the text")
            self._read(position)
            for num_sequences in self._options.slot_counts:
                for temperature in self._options.temperatures:
                    report(f"position {position}, {num_sequences} at a time, temperature {temperature:g}")
                    yield self._record(position, num_sequences, temperature)

    def _read(self, position: int) -> None:
        first, *others = self._caches
        read_tokens(self._target, first, self._text[:position], list(self._drafters.values()))
        for cache in others:
            cache.load(first.kv(cache.length, first.length))

    def _record(self, position: int, num_sequences: int, temperature: float) -> AutoRecord:
        caches, num_tokens = self._caches[:num_sequences], self._options.num_tokens
        contestants = [
            self._contestant(name, self._drafters[name], caches, self._text[:position], temperature)
            for name in self._options.contestants
        ]
        compete(contestants, num_tokens)
        first = [np.concatenate(contestant.first_token_ids(num_tokens)) for contestant in contestants]
        for cache in caches:
            cache.roll_back(position - 1)
        return AutoRecord(
            position=position,
            temperature=temperature,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            tokens_per_second={c.name: len(c.token_ids()) / c.timing.seconds for c in contestants},
            has_same_tokens=all(np.array_equal(tokens, first[0]) for tokens in first),
        )

    def _contestant(
        self, name: str, warm: Drafter, caches: list[FullKVCache], text: list[int], temperature: float
    ) -> EngineContestant:
        target, options = self._target, self._options
        sequences = []
        for number in range(len(caches)):
            sampling = SamplingParams(
                max_tokens=ROOM * options.num_tokens,
                temperature=temperature,
                min_p=options.min_p,
                seed=options.seed + number,
                ignore_eos=True,
            )
            sequences.append(Sequence(f"{name}-{number}", text, sampling, target.vocab_size, target.device))
        drafter = create_bench_drafter(name, target, self._costs)
        return hot_contestant(name, target, drafter, warm, sequences, caches)
