"""`swiftbatch bench decode`: every engine generates the same tokens from the same state, in turn.

The benchmarks of a checkout (`bench/`) share its options, texts and contestants.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.compute_options import Device, Dtype
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.bench_texts import BenchEngine, BenchError, own_tokens, text_tokens
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import CHECKPOINT_ENGINES, ENGINES, DrafterFactory
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_memory import with_tried
from swiftbatch.worker.engine.prefill import prefill_tile
from swiftbatch.worker.forward.hardware import cpu_capability
from swiftbatch.worker.forward.step_costs import Costs, seconds_now, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.free_memory import check_folder
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.output_text import OutputText

BASELINE = "autoregressive"
NUM_ROUNDS = 5  # the engines take turns, so that a busy moment of the machine hits them all
NUM_WARMUP_TOKENS = 16_384  # tokens of another job, so that drafters which learn across jobs start hot
BY_NAME: dict[str, DrafterFactory] = {name: entry.factory() for name, entry in (ENGINES | CHECKPOINT_ENGINES).items()}
"""All engines that can be named; the last ones need a checkpoint that not all models have. `bench/` adds variants."""


def _ascending(positions: tuple[int, ...]) -> tuple[int, ...]:
    if not positions or min(positions) < 1:
        raise ValueError(f"got {list(positions)}; expected at least one position, each 1 or more")
    return tuple(sorted(set(positions)))


def in_a_folder(path: Path | None) -> Path | None:
    """Check a file for figures before all is measured. Raises ValueError where its folder is not there."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"got {path}; expected a file in a folder, and there is none at {path.parent}")
    return path


Positions = Annotated[tuple[int, ...], AfterValidator(_ascending)]


class BenchOptions(Frozen):
    """A model, what it computes in and on, and the file for the figures."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = Computation.model
    dtype: Dtype = Computation.dtype
    device: Device = Computation.device
    num_threads: int = Field(default=Computation.num_threads, ge=1)
    json_path: Path | None = None

    _in_a_folder = field_validator("json_path", "plot_path", check_fields=False)(in_a_folder)

    def load(self, files: ModelFiles, slots: SlotsWanted | None = None, kv_offload: Path | None = None) -> TargetModel:
        """The model, computing as was asked for; a GPU is shared out as a worker's is. Raises ModelError, KVRoomError.

        Without `slots` caches come one by one. With `kv_offload`, a folder, they lie outside the device.
        """
        torch.set_num_threads(self.num_threads)
        folder = None if kv_offload is None else str(kv_offload)
        check_folder(folder)
        return TargetModel.load(files, self.dtype, self.device, folder, slots=slots)

    def write(self, content: dict[str, Any], found: TargetModel | dict[str, Any], **further: Any) -> None:
        """Write figures, where a file was named, with settings and the machine: as `found`, or that of a target."""
        if self.json_path is not None:
            settings = self.model_dump(mode="json", exclude={"json_path", "plot_path"}) | further
            described = found if isinstance(found, dict) else machine(found)
            write_json(self.json_path, content | {"settings": settings, "machine": described})


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
        return known_engines(engines, BY_NAME)

    @model_validator(mode="after")
    def _greedy_against_transformers(self) -> DecodeBenchOptions:
        if self.against and (self.temperature > 0 or self.repetition_penalty != 1.0):
            raise ValueError("against transformers only greedy decoding is compared; use temperature 0 and no penalty")
        return self


def known_engines(engines: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    """Check names of engines, of which there must be some. Raises ValueError."""
    names = list(known)
    if not engines or not set(engines) <= set(names) or len(set(engines)) < len(engines):
        raise ValueError(f"got {', '.join(engines) or 'none'}; expected some of: {', '.join(names)}, each once")
    return engines


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Put figures in place at once: whoever reads the file sees it whole. Raises StoreError."""
    Store(str(path.parent)).write(path.name, (json.dumps(document, indent=2) + "\n").encode())


def machine(target: TargetModel) -> dict[str, Any]:
    """Describe what figures depend on beside the settings: device, model and versions."""
    import transformers  # late: options may be refused, and a command that asks for none be half a second sooner

    modules = {"torch": torch, "transformers": transformers, "numpy": np}
    return {
        "device": str(target.device) if target.device.type == "cpu" else torch.cuda.get_device_name(target.device),
        "cpu_capability": cpu_capability(),
        "numerics": target.forwards.numerics,
        "model_fingerprint": target.files.fingerprint,
        "versions": {"python": platform.python_version()} | {name: its.__version__ for name, its in modules.items()},
    }


def check_length(files: ModelFiles, length: int, num_tokens: int) -> None:
    """Raises BenchError where the model has too few positions for `num_tokens` behind `length`."""
    if length + num_tokens > files.max_positions:
        raise BenchError(f"{length} + {num_tokens} tokens: {files.name} has {files.max_positions} positions only")


def bench_slots(
    engines: Iterable[str], longest: int, num_sequences: int = 1, files: ModelFiles | None = None
) -> SlotsWanted:
    """Return the needs of a benchmark: sequences of so many positions at most, and one more slot for probes.

    Partial caches are those of the engine that keeps most; what variants keep beyond that comes from the rest. With
    `files`, there is also room for what `auto` tries of that model.
    """
    entries = [ENGINES[name] for name in engines if name in ENGINES]
    budget, num_best = (
        max((getattr(entry, name) for entry in entries), default=0) for name in ("partial_budget", "scanned_best")
    )
    wanted = SlotsWanted(longest, budget, num_sequences + 1, num_best)
    tried = next((entry.tries for entry in entries if entry.tries is not None), None)
    return wanted if files is None or tried is None else with_tried(wanted, tried, files, None)


def digest(*token_ids: np.ndarray) -> str:
    """SHA-256 over token ids as little-endian uint32, sequence behind sequence."""
    return hashlib.sha256(np.concatenate(token_ids).astype("<u4").tobytes()).hexdigest()


class OwnPositions:
    """Positions of one generation, behind the prompt, in a cache that other generations use as well.

    Nothing moves in a cache with states: each generation has one of its own.
    """

    def __init__(self, cache: FullKVCache) -> None:
        self.cache = cache
        self.first = cache.length
        self._kv = cache.kv(0, 0).copy()

    def put_back(self) -> None:
        """Put the positions back into the cache, before the generation goes on."""
        if self.cache.is_by_position:
            self.cache.roll_back(self.first)
            self.cache.load(self._kv)

    def take_away(self) -> None:
        """Take the positions out of the cache, before another generation goes on."""
        if self.cache.is_by_position:
            self._kv = self.cache.kv(self.first, self.cache.length).copy()


@dataclass
class Timing:
    """The times and steps of one contestant's rounds."""

    seconds_per_step: list[float] = field(default_factory=list)  # one per round
    num_steps: int = 0
    seconds: float = 0.0  # of all rounds

    def add(self, seconds: float, num_steps: int) -> None:
        """Add one round; a round without steps (the last one had run ahead of it) counts nothing."""
        if num_steps:
            self.seconds_per_step.append(seconds / num_steps)
            self.num_steps += num_steps
            self.seconds += seconds


class EngineContestant:
    """One drafter for one or more sequences, each on a cache that all contestants share.

    Between rounds it keeps only its own positions behind the text.
    """

    def __init__(
        self,
        name: str,
        target: TargetModel,
        drafter: Drafter,
        sequences: list[Sequence],
        caches: list[FullKVCache],
        output_text: OutputText | None = None,
    ) -> None:
        self.name = name
        self.timing = Timing()
        self._target = target
        self._sequences = sequences
        self._own = [OwnPositions(cache) for cache in caches]
        self._drafter = drafter
        self._engine = BenchEngine(target, drafter, output_text)
        self.counters = self._engine.counters
        for sequence, cache in zip(sequences, caches, strict=True):
            self._engine.start(sequence, cache)

    def learn_from(self, warm: Drafter) -> None:
        """Know of other jobs what the `warm` drafter has learned."""
        for sequence in self._sequences:
            if state := warm.state(sequence):
                self._drafter.restore(sequence, state)

    def generate_to(self, num_tokens: int) -> None:
        """Generate until every sequence has at least `num_tokens` tokens in all, and take the time.

        Raises BenchError where one ends before.
        """
        for own in self._own:
            own.put_back()
        num_steps = self.counters.num_steps
        _wait(self._target.device)
        started = seconds_now()
        while min(sequence.num_generated_tokens for sequence in self._sequences) < num_tokens:
            if not self._engine.step():
                raise BenchError(f"{self.name}: the text ended early; use another seed")
        _wait(self._target.device)
        self.timing.add(seconds_now() - started, self.counters.num_steps - num_steps)
        for own in self._own:
            own.take_away()

    def token_ids(self) -> np.ndarray:
        """The generated tokens of all sequences, one behind the other, `[num_generated] int64`."""
        return np.concatenate([sequence.output_ids for sequence in self._sequences])


class TransformersContestant:
    """Greedy plain decoding with `transformers`' DynamicCache and its scaled-dot-product attention."""

    def __init__(self, target: TargetModel, sequence: Sequence, cache: FullKVCache) -> None:
        from transformers import DynamicCache  # late: the options of every benchmark know this module

        from swiftbatch.worker.model.causal_lm import load_causal_lm

        self.name = "transformers"
        self.timing = Timing()
        self._device = target.device
        self._model = load_causal_lm(target.files, target.dtype).to(target.device)
        self._model.set_attn_implementation("sdpa")
        self._model.eval()
        self._cache = DynamicCache()
        for index in range(target.cache_shape.num_layers):
            keys, values = (part[None, :, : cache.length].clone() for part in cache.layer(index))
            self._cache.update(keys, values, index)
        self._last = int(sequence.token_ids[-1])
        self._generated: list[int] = []
        self.counters = EngineCounters()

    @torch.inference_mode()
    def generate_to(self, num_tokens: int) -> None:
        num_steps = max(num_tokens - len(self._generated), 0)
        _wait(self._device)
        started = seconds_now()
        for _ in range(num_steps):
            inputs = torch.tensor([[self._last]], device=self._device)
            logits = self._model(input_ids=inputs, past_key_values=self._cache, use_cache=True).logits
            self._last = int(logits[0, -1].argmax())
            self._generated.append(self._last)
        _wait(self._device)
        seconds = seconds_now() - started
        self.timing.add(seconds, num_steps)
        self.counters.num_steps += num_steps
        self.counters.step_seconds["verify"] += seconds

    def token_ids(self) -> np.ndarray:
        return np.array(self._generated, dtype=np.int64)


Contestant = EngineContestant | TransformersContestant


def _wait(device: torch.device) -> None:
    """Let queued work end, so that a clock read next to it means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compete(contestants: Items[Contestant], num_tokens: int, num_rounds: int = NUM_ROUNDS, first: int = 0) -> None:
    """Let all generate a part of the tokens in turn, round by round, each time in another order from `first` on."""
    for round_number in range(num_rounds):
        leader = (first + round_number) % len(contestants)
        for contestant in (*contestants[leader:], *contestants[:leader]):
            contestant.generate_to(num_tokens * (round_number + 1) // num_rounds)


def run_decode_bench(
    options: DecodeBenchOptions, report: Callable[[str], None] = lambda line: None
) -> list[DecodeRecord]:
    """Measure all engines at all positions; `report` gets a line about each stage. Raises BenchError, ModelError."""
    files, highest = locate_model(options.model), options.positions[-1]
    check_length(files, highest, options.num_tokens)
    longest = max(highest + options.num_tokens, num_warmup_tokens(files))
    target = options.load(files, bench_slots(options.engines, longest, files=files))
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
        yield from _records(contestants, position, options.temperature)
        cache.roll_back(position - 1)  # which changes nothing where contestants have caches of their own


def num_warmup_tokens(files: ModelFiles) -> int:
    return min(NUM_WARMUP_TOKENS, files.max_positions // 2)


def read_tokens(target: TargetModel, cache: FullKVCache, token_ids: list[int], drafters: list[Drafter]) -> None:
    """Read all but the last token, which the first step's root row adds; drafters learn as from any prompt."""
    known, drawing = np.array(token_ids[:-1]), target.forwards.new_batch_sampler()
    while cache.length < len(known):
        prefill_tile(target, cache, known, drafters, drawing)


def _contestants(
    options: DecodeBenchOptions,
    target: TargetModel,
    costs: Costs,
    cache: FullKVCache,
    text: list[int],
    drafters: Mapping[str, Drafter],
) -> Iterator[Contestant]:
    drawn_with = options.model_dump(include={"temperature", "min_p", "repetition_penalty", "seed"})
    sampling = SamplingParams(max_tokens=options.num_tokens, ignore_eos=True, **drawn_with)
    for name in options.engines:
        sequence = Sequence(name, text, sampling, target.vocab_size, target.device)
        drafter = BY_NAME[name](target, costs, options.draft_model)
        own = cache if cache.is_by_position else _own_cache(target, cache, text, options.num_tokens)
        contestant = EngineContestant(name, target, drafter, [sequence], [own])
        contestant.learn_from(drafters[name])
        yield contestant
    if options.against == "transformers":
        yield TransformersContestant(target, Sequence("transformers", text, sampling, target.vocab_size), cache)


def _own_cache(target: TargetModel, cache: FullKVCache, text: list[int], num_tokens: int) -> FullKVCache:
    """A cache behind the same text as `cache`, whose states no other generation moves."""
    own = target.new_cache(len(text) + num_tokens)
    if end := cache.copyable_end(cache.length):
        own.copy_from(cache, end)
    read_tokens(target, own, text, [])
    return own


def warm_drafters(
    target: TargetModel, costs: Costs, engines: tuple[str, ...], parts: Path | None
) -> dict[str, Drafter]:
    """Drafters as a worker has them after another job: the model's own text, which holds nothing of the bench's."""
    drafters = {name: BY_NAME[name](target, costs, parts) for name in engines}
    if any(drafter.needs_top_k for drafter in drafters.values()):  # other drafters know only what is in the text
        num_tokens = num_warmup_tokens(target.files)
        other_job = own_tokens(target, num_tokens)
        read_tokens(target, target.new_cache(num_tokens), other_job, list(drafters.values()))
    return drafters


class DecodeRecord(Frozen):
    """One engine at one position. `speedup` is over `autoregressive` in the same run, None where that did not run."""

    engine: str
    position: int
    temperature: float
    num_tokens: int
    ms_per_token: float  # median over the rounds of the time per step, times steps per token
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    speedup: float | None
    tokens_sha256: str  # over the generated ids as little-endian uint32
    num_steps: int
    propose_ms: float  # per step
    verify_ms: float
    commit_ms: float


def _records(contestants: Items[Contestant], position: int, temperature: float) -> Iterator[DecodeRecord]:
    times = {contestant.name: _ms_per_token(contestant) for contestant in contestants}
    baseline = times.get(BASELINE)
    for contestant in contestants:
        counters, token_ids, ms = contestant.counters, contestant.token_ids(), times[contestant.name]
        yield DecodeRecord(
            engine=contestant.name,
            position=position,
            temperature=temperature,
            num_tokens=len(token_ids),
            ms_per_token=ms,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            mean_acceptance_length=counters.mean_acceptance_length,
            speedup=baseline / ms if baseline else None,
            tokens_sha256=digest(token_ids),
            num_steps=counters.num_steps,
            **{f"{name}_ms": 1000 * s / counters.num_steps for name, s in counters.step_seconds.items()},
        )


def _ms_per_token(contestant: Contestant) -> float:
    timing = contestant.timing
    return 1000 * statistics.median(timing.seconds_per_step) * timing.num_steps / len(contestant.token_ids())


def render(records: Items[DecodeRecord]) -> Table:
    """A table for people; tokens that differ from the baseline's are marked."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("position", "T", "engine", "ms per\ntoken", "speed-up", "acceptance\nlength", "same\ntokens"):
        is_text = header in ("engine", "same\ntokens")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=header != "same\ntokens")
    first = {record.position: record.tokens_sha256 for record in reversed(records)}
    for record in records:
        table.add_row(
            str(record.position),
            f"{record.temperature:g}",
            record.engine,
            f"{record.ms_per_token:.2f}",
            "-" if record.speedup is None else f"{record.speedup:.2f}x",
            f"{record.mean_acceptance_length:.2f}",
            "yes" if record.tokens_sha256 == first[record.position] else "no",
        )
    return table
