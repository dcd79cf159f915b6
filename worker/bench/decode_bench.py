"""`swiftbatch bench decode`: every engine generates the same tokens from the same state, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_engine import own_tokens, text_tokens
from swiftbatch.worker.bench.bench_options import BenchOptions, Positions, check_length
from swiftbatch.worker.bench.bench_variants import BY_NAME, bench_slots, create_bench_drafter
from swiftbatch.worker.bench.decode_contestants import Contestant, EngineContestant, TransformersContestant
from swiftbatch.worker.bench.decode_figures import DecodeRecord, make_records
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.engine.prefill import read_tile
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.target.step_costs import Costs, step_costs_of
from swiftbatch.worker.target.target import TargetModel

NUM_ROUNDS = 5  # the engines take turns, so that a busy moment of the machine hits them all
NUM_WARMUP_TOKENS = 16_384  # tokens of another job, so that drafters which learn across jobs start hot


class DecodeBenchOptions(BenchOptions):
    """The measurement asked for. `num_tokens` are generated behind each of `positions` (tokens in the cache)."""

    draft_model: Path | None = None
    engines: tuple[str, ...]
    positions: Positions
    num_tokens: int = Field(ge=NUM_ROUNDS)
    temperature: float = Field(ge=0.0, le=100.0)
    min_p: float = Field(ge=0.0, le=1.0)
    repetition_penalty: float = Field(gt=0.0)
    text: Path | None = None
    against: Literal["transformers"] | None = None
    seed: int = Field(ge=0)

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in engines if name not in BY_NAME]
        if unknown or not engines or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines) or 'none'}; expected some of: {', '.join(BY_NAME)}, each once")
        return engines

    @model_validator(mode="after")
    def _greedy_against_transformers(self) -> DecodeBenchOptions:
        if self.against and (self.temperature > 0 or self.repetition_penalty != 1.0):
            raise ValueError("against transformers only greedy decoding is compared; use temperature 0 and no penalty")
        return self


def run_decode_bench(
    options: DecodeBenchOptions, report: Callable[[str], None] = lambda line: None
) -> list[DecodeRecord]:
    """Measure all engines at all positions; `report` gets a line about each stage. Raises BenchError, ModelError."""
    files = locate_model(options.model)
    check_length(files, options.positions[-1], options.num_tokens)
    target = options.load(files, bench_slots(options.engines, _longest(files, options), files=files))
    records = list(decode_records(target, options, report))
    results = {"results": [record.model_dump() for record in records]}
    options.write(results, target, num_warmup_tokens=NUM_WARMUP_TOKENS)
    return records


def decode_records(
    target: TargetModel, options: DecodeBenchOptions, report: Callable[[str], None]
) -> Iterator[DecodeRecord]:
    """Measure all engines on a loaded model, two caches of which have room at a time. Raises BenchError, ModelError.

    The records of a position come once all engines have been there.
    """
    files, highest = target.files, options.positions[-1]
    report(f"text of {highest} tokens: {options.text or 'the model goes on from a built-in prompt'}")
    text = text_tokens(options.text, files, highest) if options.text else own_tokens(target, highest)
    costs = step_costs_of(target)
    drafters = warm_drafters(target, costs, options.engines, options.draft_model)
    cache = target.new_cache(highest + options.num_tokens)
    for position in options.positions:
        report(f"position {position}: reading the text, then {options.num_tokens} tokens with each engine")
        read_tokens(target, cache, text[:position], list(drafters.values()))
        contestants = list(_contestants(options, target, costs, cache, text[:position], drafters))
        compete(contestants, options.num_tokens)
        yield from make_records(contestants, position, options.temperature)
        cache.roll_back(position - 1)  # which changes nothing where contestants have caches of their own


def _longest(files: ModelFiles, options: DecodeBenchOptions) -> int:
    """Positions of the longest text that is read or generated."""
    return max(options.positions[-1] + options.num_tokens, num_warmup_tokens(files))


def num_warmup_tokens(files: ModelFiles) -> int:
    return min(NUM_WARMUP_TOKENS, files.max_positions // 2)


def read_tokens(target: TargetModel, cache: FullKVCache, token_ids: list[int], drafters: list[Drafter]) -> None:
    """Read all but the last token, which the first step's root row adds; drafters learn as from any prompt."""
    known, drawing = np.array(token_ids[:-1]), target.forwards.new_drawing()
    while cache.length < len(known):
        read_tile(target, cache, known, drafters, drawing)


def compete(contestants: Items[Contestant], num_tokens: int, num_rounds: int = NUM_ROUNDS, first: int = 0) -> None:
    """Let all generate a part of the tokens in turn, round by round, each time in another order from `first` on."""
    for round_number in range(num_rounds):
        leader = (first + round_number) % len(contestants)
        for contestant in (*contestants[leader:], *contestants[:leader]):
            contestant.generate_to(num_tokens * (round_number + 1) // num_rounds)


def _contestants(
    options: DecodeBenchOptions,
    target: TargetModel,
    costs: Costs,
    cache: FullKVCache,
    text: list[int],
    drafters: dict[str, Drafter],
) -> Iterator[Contestant]:
    sampling = SamplingParams(
        max_tokens=options.num_tokens,
        temperature=options.temperature,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        ignore_eos=True,
    )
    for name in options.engines:
        sequence = Sequence(name, text, sampling, target.vocab_size, target.device)
        drafter = create_bench_drafter(name, target, costs, options.draft_model)
        own = cache if cache.is_by_position else _own_cache(target, cache, text, options.num_tokens)
        yield hot_contestant(name, target, drafter, drafters[name], [sequence], [own])
    if options.against == "transformers":
        yield TransformersContestant(target, Sequence("transformers", text, sampling, target.vocab_size), cache)


def _own_cache(target: TargetModel, cache: FullKVCache, text: list[int], num_tokens: int) -> FullKVCache:
    """A cache behind the same text as `cache`, whose states no other generation moves."""
    own = target.new_cache(len(text) + num_tokens)
    if end := cache.copyable_end(cache.length):
        own.copy_from(cache, end)
    read_tokens(target, own, text, [])
    return own


def hot_contestant(
    name: str,
    target: TargetModel,
    drafter: Drafter,
    warm: Drafter,
    sequences: list[Sequence],
    caches: list[FullKVCache],
) -> EngineContestant:
    """Make a contestant whose fresh `drafter` knows of other jobs what the `warm` one has learned."""
    contestant = EngineContestant(name, target, drafter, sequences, caches)
    for sequence in sequences:
        if state := warm.state(sequence):
            drafter.restore(sequence, state)
    return contestant


def warm_drafters(
    target: TargetModel, costs: Costs, engines: tuple[str, ...], parts: Path | None
) -> dict[str, Drafter]:
    """Drafters as a worker has them after another job: the model's own text, which holds nothing of the bench's."""
    drafters = {name: create_bench_drafter(name, target, costs, parts) for name in engines}
    if any(drafter.needs_top_k for drafter in drafters.values()):  # other drafters know only what is in the text
        num_tokens = num_warmup_tokens(target.files)
        other_job = own_tokens(target, num_tokens)
        read_tokens(target, target.new_cache(num_tokens), other_job, list(drafters.values()))
    return drafters
