"""`swiftbatch bench decode`: every engine generates the same tokens in turn; `bench/` uses parts of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, field_validator, model_validator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run_records import Device, Dtype, LinearName
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import (
    CHECKPOINT_ENGINES,
    DEFAULT_ENGINE,
    ENGINES,
    PAPER_ENGINES,
    DrafterFactory,
    engine_entry,
    with_tried,
)
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.prefill import prefill_tile
from swiftbatch.worker.forward.hardware import cpu_capability
from swiftbatch.worker.forward.step_costs import Costs, seconds_now, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.kv_capacity import check_folder
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.model.user_cache import cache_folder
from swiftbatch.worker.sampling.draft_tree import Verification
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec

BASELINE = "autoregressive"
NUM_ROUNDS = 5  # engines take turns, so that other load on the machine affects all
NUM_WARMUP_TOKENS = 16_384  # tokens of another job, for drafters that learn across jobs
BY_NAME: dict[str, DrafterFactory] = {
    name: entry.factory() for name, entry in (ENGINES | PAPER_ENGINES | CHECKPOINT_ENGINES).items()
}
"""Engines by name, also those whose checkpoint not all models have; `bench/` adds variants."""
PROMPT = (
    "The mill stood where the river bent, and the miller's daughter kept its accounts. Every evening she wrote down "
    "what the farmers had brought and what they had taken home, and every evening the sum came out a little short. "
    "On the first day of autumn she made up her mind to stay awake and see who was helping himself to the flour."
)
COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length")
Record = dict[str, Any]


class BenchError(UserError):
    """Benchmark that cannot run as requested."""


class BenchEngine(Engine):
    def step(self) -> list[tuple[Sequence, Verification]]:
        results = super().step()
        for error in (sequence.error for sequence in self.sequences if sequence.error is not None):
            raise BenchError(error)
        return results


class BenchOptions(Frozen):
    """Model, its computation, and the file for the figures."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = Computation.model
    dtype: Dtype = Computation.dtype
    device: Device = Computation.device
    linear: LinearName = Computation.linear
    num_threads: int = Field(default=Computation.num_threads, ge=1)
    json_path: Path | None = None

    @field_validator("json_path")
    @classmethod
    def _in_a_folder(cls, path: Path | None) -> Path | None:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"got {path}; expected a file in a folder, and there is none at {path.parent}")
        return path

    def load(self, files: ModelFiles, slots: SlotsWanted | None = None, kv_offload: Path | None = None) -> TargetModel:
        """Raise ModelError, KVRoomError."""
        torch.set_num_threads(self.num_threads)
        check_folder(folder := None if kv_offload is None else str(kv_offload))
        kernels = CudaKernels(linear=self.linear)
        return TargetModel.load(files, self.dtype, self.device, folder, slots=slots, kernels=kernels)


class DecodeBenchOptions(BenchOptions):
    """Requested measurement: `num_tokens` after each of `positions` (tokens in the cache)."""

    draft_model: Path | None = None
    engines: tuple[str, ...]
    engine_options: tuple[str, ...] = ()  # NAME=VALUE, for all engines that have the option
    positions: tuple[int, ...]
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
        if not engines or not set(engines) <= BY_NAME.keys() or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines) or 'none'}; expected some of: {', '.join(BY_NAME)}, each once")
        return engines

    @field_validator("positions")
    @classmethod
    def _ascending(cls, positions: tuple[int, ...]) -> tuple[int, ...]:
        if not positions or min(positions) < 1:
            raise ValueError(f"got {list(positions)}; expected at least one position, each 1 or more")
        return tuple(sorted(set(positions)))

    @model_validator(mode="after")
    def _known_options(self) -> DecodeBenchOptions:
        known = sorted({name for engine in self.engines for name in option_names(engine)})
        for text in self.engine_options:
            if option_name(text) not in known:
                raise ValueError(f"--engine-option {text}: expected one of: {', '.join(known) or 'none'}")
        return self

    @model_validator(mode="after")
    def _greedy_against_transformers(self) -> DecodeBenchOptions:
        if self.against and (self.temperature > 0 or self.repetition_penalty != 1.0):
            raise ValueError("against transformers only greedy decoding is compared; use temperature 0 and no penalty")
        return self


def machine(target: TargetModel) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "device": str(target.device) if target.device.type == "cpu" else torch.cuda.get_device_name(target.device),
        "cpu_capability": cpu_capability(),
        "numerics": target.forwards.numerics,
        "model_fingerprint": target.files.fingerprint,
        "versions": {"python": platform.python_version()} | versions,
    }


def check_length(files: ModelFiles, length: int, num_tokens: int) -> None:
    if length + num_tokens > files.max_positions:
        raise BenchError(f"{length} + {num_tokens} tokens: {files.name} has {files.max_positions} positions only")


def bench_slots(
    engines: Iterable[str], longest: int, num_jobs: int = 1, files: ModelFiles | None = None
) -> SlotsWanted:
    """Return slots for jobs of `longest` positions, and one for probes."""
    known = ENGINES | PAPER_ENGINES
    entries = [known[name] for name in engines if name in known]
    slots = [entry.slots(longest, num_jobs + 1) for entry in entries] or [SlotsWanted(longest, num_slots=num_jobs + 1)]
    wanted = max(slots, key=lambda each: each.partial_budget)
    tried = [entry.tries for entry in entries if entry.tries is not None and files is not None]
    return with_tried(wanted, tried[0], files, None) if tried and files else wanted


def digest(*token_ids: np.ndarray) -> str:
    """Return the SHA-256 of token ids as little-endian uint32."""
    return hashlib.sha256(np.concatenate(token_ids).astype("<u4").tobytes()).hexdigest()


class Contestant:
    """Engine with a sequence in each cache; contestants share caches, except those with states."""

    def __init__(self, name: str, engine: Any, sequences: list[Sequence], caches: list[FullKVCache]) -> None:
        self.name, self.engine = name, engine
        self.caches, self.firsts = caches, [cache.length for cache in caches]
        # seconds and steps; a round already covered by the last one adds none
        self.rounds: list[tuple[float, int]] = []
        self.start(sequences)

    def start(self, sequences: list[Sequence]) -> None:
        self.sequences, self._kv = sequences, [cache.kv(0, 0).copy() for cache in self.caches]
        for sequence, cache in zip(sequences, self.caches, strict=True):
            self.engine.start(sequence, cache)

    def generate_to(self, num_tokens: int) -> None:
        """Generate until every sequence has `num_tokens`, and take the time. Raises BenchError if one ends."""
        for cache, first, kv in zip(self.caches, self.firsts, self._kv, strict=True):
            if cache.is_by_position:
                cache.roll_back(first)
                cache.load(kv)
        started, num_steps = _now(), self.engine.counters.num_steps
        while min(sequence.num_generated_tokens for sequence in self.sequences) < num_tokens:
            if not self.engine.step():
                raise BenchError(f"{self.name}: the text ended early; use another seed")
        if num_new := self.engine.counters.num_steps - num_steps:
            self.rounds.append((_now() - started, num_new))
        if self.caches[0].is_by_position:
            self._kv = [cache.kv(self.firsts[i], cache.length).copy() for i, cache in enumerate(self.caches)]

    def token_ids(self) -> np.ndarray:
        return np.concatenate([sequence.output_ids for sequence in self.sequences])


class TransformersEngine:
    """Greedy plain decoding of one sequence with `transformers`' DynamicCache and scaled-dot-product attention."""

    def __init__(self, target: TargetModel) -> None:
        from transformers import DynamicCache  # imported here because few runs need it

        from swiftbatch.worker.model.causal_lm import load_causal_lm

        self.counters, self._cache, self._target = EngineCounters(), DynamicCache(), target
        self._model = load_causal_lm(target.files, target.dtype).to(target.device).eval()
        self._model.set_attn_implementation("sdpa")

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._sequence = sequence
        for index in range(self._target.cache_shape.num_layers):
            keys, values = (part[None, :, : cache.length].clone() for part in cache.layer(index))
            self._cache.update(keys, values, index)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        started, inputs = seconds_now(), torch.tensor([[self._sequence.token_ids[-1]]], device=self._target.device)
        logits = self._model(input_ids=inputs, past_key_values=self._cache, use_cache=True).logits
        self._sequence.extend([int(logits[0, -1].argmax())])
        self.counters.num_steps += 1
        self.counters.step_seconds["verify"] += seconds_now() - started
        return [self._sequence]


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return seconds_now()


def compete(contestants: list[Contestant], num_tokens: int, num_rounds: int = NUM_ROUNDS, first: int = 0) -> None:
    """Let all generate their tokens in turn, in rounds with rotating order."""
    for round_number in range(num_rounds):
        leader = (first + round_number) % len(contestants)
        for contestant in (*contestants[leader:], *contestants[:leader]):
            contestant.generate_to(num_tokens * (round_number + 1) // num_rounds)


def run_decode_bench(options: DecodeBenchOptions, report: Callable[[str], None] = lambda line: None) -> list[Record]:
    """Measure all engines at all positions; `report` gets a line per stage. Raises BenchError, ModelError."""
    files, highest = locate_model(options.model), options.positions[-1]
    check_length(files, highest, options.num_tokens)
    longest = max(highest + options.num_tokens, min(NUM_WARMUP_TOKENS, files.max_positions // 2))
    target = options.load(files, bench_slots(options.engines, longest, files=files))
    records = list(decode_records(target, options, report))
    if (path := options.json_path) is not None:
        settings = options.model_dump(mode="json", exclude={"json_path"}) | {"num_warmup_tokens": NUM_WARMUP_TOKENS}
        document = {"results": records, "settings": settings, "machine": machine(target)}
        Store(str(path.parent)).write(path.name, (json.dumps(document, indent=2) + "\n").encode())
    return records


def decode_records(target: TargetModel, options: DecodeBenchOptions, report: Callable[[str], None]) -> Iterator[Record]:
    """Yield a position's records once all engines have run. Raises BenchError, ModelError."""
    highest, costs = options.positions[-1], step_costs_of(target)
    report(f"text of {highest} tokens: {options.text or 'the model goes on from a built-in prompt'}")
    text = text_tokens(options.text, target.files, highest) if options.text else own_tokens(target, highest)
    drafters = warm_drafters(target, costs, options.engines, options.draft_model, options.engine_options)
    cache = target.new_cache(highest + options.num_tokens)
    for position in options.positions:
        report(f"position {position}: reading the text, then {options.num_tokens} tokens with each engine")
        read_tokens(target, cache, text[:position], list(drafters.values()))
        contestants = list(_contestants(options, target, costs, cache, text[:position], drafters))
        compete(contestants, options.num_tokens)
        yield from _records(contestants, position, options.temperature)
        cache.roll_back(position - 1)  # no effect if contestants have their own caches


def read_tokens(target: TargetModel, cache: FullKVCache, token_ids: list[int], drafters: list[Drafter]) -> None:
    """Read all but the last token, the first step's root."""
    known, sampler = np.array(token_ids[:-1]), target.forwards.new_batch_sampler()
    while cache.length < len(known):
        prefill_tile(target, cache, known, drafters, sampler)


def _contestants(
    options: DecodeBenchOptions, target: TargetModel, costs: Costs, cache: FullKVCache, text: list[int],
    drafters: dict[str, Drafter],
) -> Iterator[Contestant]:  # fmt: skip
    sampled = options.model_dump(include={"temperature", "min_p", "repetition_penalty", "seed"})
    sampling = SamplingParams(max_tokens=options.num_tokens, ignore_eos=True, **sampled)
    for name in options.engines:
        sequence = Sequence(name, text, sampling, target.vocab_size, target.device)
        drafter, own = drafter_factory(name, options.engine_options)(target, costs, options.draft_model), cache
        if not cache.is_by_position:
            own = target.new_cache(len(text) + options.num_tokens)
            if end := cache.copyable_end(cache.length):
                own.copy_from(cache, end)
            read_tokens(target, own, text, [])
        contestant = Contestant(name, BenchEngine(target, drafter), [sequence], [own])
        if state := drafters[name].state(sequence):  # learned from other jobs
            drafter.restore(sequence, state)
        yield contestant
    if options.against == "transformers":
        sequence = Sequence("", text, sampling, target.vocab_size)
        yield Contestant("transformers", TransformersEngine(target), [sequence], [cache])


def drafter_factory(name: str, given: tuple[str, ...] = ()) -> DrafterFactory:
    """Return an engine's factory, with those of the given options NAME=VALUE that the engine has.

    Raises ModelError for values out of range.
    """
    own = tuple(text for text in given if option_name(text) in option_names(name))
    return engine_entry(name, own).factory() if own else BY_NAME[name]


def option_name(text: str) -> str:
    return text.partition("=")[0]


def option_names(engine: str) -> list[str]:
    entry = (ENGINES | PAPER_ENGINES).get(engine)
    return [] if entry is None or entry.options is None else list(type(entry.options).model_fields)


def warm_drafters(
    target: TargetModel, costs: Costs, engines: Iterable[str], parts: Path | None, given: tuple[str, ...] = ()
) -> dict[str, Drafter]:
    """Return drafters that have seen another job: the model's own text."""
    drafters = {name: drafter_factory(name, given)(target, costs, parts) for name in engines}
    if any(drafter.needs_top_k for drafter in drafters.values()):  # other drafters learn only from the text
        num_tokens = min(NUM_WARMUP_TOKENS, target.files.max_positions // 2)
        text, cache = own_tokens(target, num_tokens), target.new_cache(num_tokens)
        read_tokens(target, cache, text, list(drafters.values()))
        sequence = Sequence("warm-up", text, SamplingParams(max_tokens=1), target.vocab_size, target.device)
        for drafter in drafters.values():
            if drafter.needs_top_k:
                drafter.start(sequence, cache)
                drafter.stop(sequence)
    return drafters


def _records(contestants: list[Contestant], position: int, temperature: float) -> Iterator[Record]:
    times = {each.name: ms_per_token(each) for each in contestants}
    for each in contestants:
        counters, ms, baseline = each.engine.counters, times[each.name], times.get(BASELINE)
        yield {
            "engine": each.name,
            "position": position,
            "temperature": temperature,
            "num_tokens": len(each.token_ids()),
            "ms_per_token": ms,
            "speedup": baseline / ms if baseline else None,
            "tokens_sha256": digest(each.token_ids()),
            **{name: getattr(counters, name) for name in COUNTED},
            **{f"{name}_ms": 1000 * s / counters.num_steps for name, s in counters.step_seconds.items()},
        }


def ms_per_token(contestant: Contestant) -> float:
    """Return the median time per step over the rounds, times steps per token."""
    num_steps, num_tokens = contestant.engine.counters.num_steps, len(contestant.token_ids())
    seconds = statistics.median(seconds / steps for seconds, steps in contestant.rounds)
    return float(1000 * seconds * num_steps / num_tokens)


def render(records: list[Record]) -> Table:
    """Return a table with marks at tokens that differ from the baseline's."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("position", "T", "engine", "ms per\ntoken", "speed-up", "acceptance\nlength", "same\ntokens"):
        is_text = header in ("engine", "same\ntokens")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=header != "same\ntokens")
    first = {record["position"]: record["tokens_sha256"] for record in reversed(records)}
    for each in records:
        place = str(each["position"]), f"{each['temperature']:g}", each["engine"]
        speedup = "-" if each["speedup"] is None else f"{each['speedup']:.2f}x"
        figures = f"{each['ms_per_token']:.2f}", speedup, f"{each['mean_acceptance_length']:.2f}"
        table.add_row(*place, *figures, "yes" if each["tokens_sha256"] == first[each["position"]] else "no")
    return table


def encode(files: ModelFiles, text: str) -> list[int]:
    return TextCodec(files).encode(text, add_special_tokens=False)


def read_text(path: Path) -> str:
    """Return a UTF-8 file, or the joined `text` fields of a `.jsonl` file. Raises BenchError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BenchError(f"text {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"text {path}: cannot be read as UTF-8: {error}") from error
    if path.suffix != ".jsonl":
        return text
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            texts += [json.loads(line)["text"] + ""] if line.strip() else []
        except (ValueError, KeyError, TypeError):
            expected = 'expected a JSON object with a string field "text"'
            raise BenchError(f"text {path}, line {number}: {expected}") from None
    return "\n\n".join(texts)


def text_tokens(path: Path, files: ModelFiles, num_tokens: int) -> list[int]:
    ids = encode(files, read_text(path))
    if len(ids) < num_tokens:
        raise BenchError(f"text {path}: it has {len(ids)} tokens, the highest position needs {num_tokens}")
    return ids[:num_tokens]


def own_tokens(target: TargetModel, num_tokens: int) -> list[int]:
    """Return the first `num_tokens` tokens of a built-in prompt and the model's continuation, cached on disk."""
    folder = cache_folder("bench")
    path = folder / f"{target.files.fingerprint[:16]}-{str(target.dtype).removeprefix('torch.')}.npy"
    known = np.load(path, allow_pickle=False).tolist() if path.is_file() else encode(target.files, PROMPT)
    if len(known) < num_tokens:
        num_new = num_tokens - len(known)
        sampling = SamplingParams(max_tokens=num_new, temperature=1.0, min_p=0.1, seed=1, ignore_eos=True)
        sequence = Sequence("bench-text", known, sampling, target.vocab_size, target.device)
        engine = BenchEngine(target, BY_NAME[DEFAULT_ENGINE](target, step_costs_of(target), None))
        engine.start(sequence)
        while sequence.finish_reason is None:
            engine.step()
        known = [int(token_id) for token_id in sequence.token_ids]
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.npy")
        np.save(aside, np.array(known, dtype=np.uint32))
        aside.replace(path)
    return known[:num_tokens]
