"""A long generation, compared on the way with plain decoding at the same positions."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from bench.options import TextOptions
from bench.tables import Record, only
from bench.text_samples import loop_start, sampled_tokens
from bench.variants import create_bench_drafter
from swiftbatch.jobs import sampling_params
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import (
    BenchEngine,
    bench_slots,
    check_length,
    digest,
    own_tokens,
    read_tokens,
    text_tokens,
)
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, Drafter
from swiftbatch.worker.drafters.engine_options import TOKENSWIFT_PAPER, TokenSwiftOptions
from swiftbatch.worker.drafters.self_speculation import Chain
from swiftbatch.worker.drafters.tokenswift.tokenswift import (
    Sources,
    TokenSwiftProposer,
    by_token,
    tokenswift,
)
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import SparseCacheFactory
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.running_job import distinct
from swiftbatch.worker.text.tokenizer import TextCodec

NUM_PLAIN_TOKENS = 24  # per window
NUM_SHOWN = 96  # tokens of a loop
RATES = ("speedup", "alpha", "beta", "tokens_per_step")
COLUMNS = (
    *("num_tokens", "total.seconds", "total.plain_seconds", *(f"total.{rate}" for rate in RATES)),
    *("window.ms_per_token", "window.plain_ms_per_token", *(f"window.{rate}" for rate in RATES), "same_tokens"),
)
METERED = {"tokenswift-paper": TOKENSWIFT_PAPER, "tokenswift": TokenSwiftOptions()}
NOTHING = Sources([], [])


@dataclass
class _Asked:
    """A requested tree's text length and sources."""

    start: int
    sources: Sources = NOTHING


class MeteredProposer(TokenSwiftProposer):
    """A proposer that remembers each tree's sources until it is verified."""

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
        for one, later in itertools.pairwise(asked):  # the token before the later tree was drawn, not proposed
            path = tuple(sequence.token_ids[one.start : min(end, later.start - 1)].tolist())
            self._tally.num_accepted_tokens += sum(by_ngrams_alone(path, one.sources))
        super().update(sequence, verification)


def by_ngrams_alone(path: tuple[int, ...], sources: Sources) -> list[bool]:
    """Return which tokens of a path only n-grams proposed."""
    ngrams = [tuple(token for _, token in ngram) for ngram in sources.ngrams]
    in_digits, is_alone, found = True, False, []
    for depth, token in enumerate(path):
        in_digits = in_digits and depth < len(sources.levels) and token in by_token(sources.levels[depth])
        is_alone = is_alone or not (in_digits or token in sources.others(path[:depth]))
        is_alone = is_alone and any(ngram[: depth + 1] == path[: depth + 1] for ngram in ngrams)
        found.append(is_alone)
    return found


def metered_drafter(
    engine: str,
    target: TargetModel,
    costs: Costs,
    parts_folder: Path | None,
    options: TokenSwiftOptions | None = None,
    new_cache: SparseCacheFactory | None = None,
) -> tuple[Drafter, ReuseTally | None]:
    """Make an engine's drafter and the tally of its n-grams, if any. Raises ModelError."""
    if engine not in METERED:
        return create_bench_drafter(engine, target, costs, parts_folder), None
    tally = ReuseTally()
    new_proposer = partial(MeteredProposer, tally)
    return tokenswift(target, costs, parts_folder, options or METERED[engine], new_cache, new_proposer), tally


@dataclass
class ReuseTally:
    num_accepted_tokens: int = 0  # proposed by n-grams alone


class Options(TextOptions):
    """Options; plain decoding's `NUM_PLAIN_TOKENS` every `plain_every` tokens do not count."""

    engine: str = Computation.engine
    draft_model: Path | None = None
    num_tokens: int = 100_000
    prefill: int = 4096
    every: int = 20_000
    plain_every: int = 2500
    temperature: float = 0.0
    top_p: float = sampling_params.TOP_P
    eta: float = sampling_params.ETA
    repetition_penalty: float = sampling_params.REPETITION_PENALTY
    penalty_window: int = sampling_params.PENALTY_WINDOW
    sampled: bool = Field(default=False, description="Begin the prompt anywhere in the text, as the seed says.")
    with_text: bool = Field(default=False, description="Put the output's text into the last record.")

    @property
    def sampling(self) -> SamplingParams:
        sampled = self.model_dump(include=set(SamplingParams.model_fields))
        return SamplingParams(max_tokens=self.num_tokens, ignore_eos=True, **sampled)

    def record_stops(self) -> list[int]:
        return [*range(self.every, self.num_tokens, self.every), self.num_tokens]

    def plain_stops(self) -> list[int]:
        last = max(0, self.num_tokens - NUM_PLAIN_TOKENS)
        grid = {*range(0, last, self.plain_every), *self.record_stops(), last}
        return sorted(stop for stop in grid if stop <= last)


def run(options: Options) -> Iterator[Record]:
    """Generate one long text, and compare with plain decoding at the same positions.

    Alpha is the accepted tokens divided by the depth of the drafts, beta the part of it that token reuse alone
    proposed. `total` is since the start, `window` since the record before.

    \b
    Example:
      python -m bench long --engine tokenswift --tokens 100000 --prefill 4096 --json long.jsonl
    """
    files = locate_model(options.model)
    check_length(files, options.prefill, options.num_tokens)
    target = options.load(files, bench_slots([options.engine], options.prefill + options.num_tokens))
    yield from generated(
        options, target, *metered_drafter(options.engine, target, step_costs_of(target), options.draft_model)
    )


def shown(records: list[Record], options: Options) -> list[Record]:
    return only(records, COLUMNS)


def generated(
    options: Options, target: TargetModel, drafter: Drafter, reuse: ReuseTally | None, room: int = 0
) -> Iterator[Record]:
    """Yield figures at every stop; `room` positions are for trees larger than those of engines. Raises BenchError."""
    generation = LongGeneration(options, target, drafter, reuse, room)
    sequence, plain = generation.sequence, PlainWindows(target, NUM_PLAIN_TOKENS)
    plain_stops, record_stops = set(options.plain_stops()), set(options.record_stops())
    before: Record | None = None
    start: Record = {}
    for stop in sorted(plain_stops | record_stops):
        mark = generation.run_to(stop)
        start = start or mark
        if stop in plain_stops:
            plain.measure(sequence, generation.cache)
        if stop in record_stops and mark["num_tokens"] > (before or start)["num_tokens"]:  # a step may pass two stops
            yield {
                "engine": options.engine,
                "num_tokens": mark["num_tokens"],
                "window": _between(before or start, mark, plain),
                "total": _between(start, mark, plain),
                "distinct": distinct(sequence.output_ids),
                "loop_start": loop_start(sequence.output_ids),
                "same_tokens": all(plain.compared(sequence.output_ids)),
                "tokens_sha256": digest(sequence.output_ids),
                **(text_of(target, sequence) if options.with_text and stop == options.num_tokens else {}),
            }
            before = mark


def text_of(target: TargetModel, sequence: Sequence) -> Record:
    """Return the output's text, and what stands where it begins to repeat itself, if it does."""
    codec, start = TextCodec(target.files), loop_start(sequence.output_ids)
    loop = None if start is None else " ".join(codec.decode(sequence.output_ids[start:][:NUM_SHOWN].tolist()).split())
    return {"loop": loop, "text": codec.decode(sequence.output_ids.tolist())}


class LongGeneration:
    """A generation; marks are taken in pauses, which do not count."""

    def __init__(
        self, options: Options, target: TargetModel, drafter: Drafter, reuse: ReuseTally | None, room: int = 0
    ) -> None:
        self._drafter, self._reuse, self._num_draft_depth = drafter, reuse, 0
        prompt_ids = _prompt(options, target)
        self.sequence = Sequence("long", prompt_ids, options.sampling, target.vocab_size, target.device)
        self.cache = target.new_cache(self.sequence.max_length + room)
        read_tokens(target, self.cache, prompt_ids, [drafter])
        self._engine = BenchEngine(target, drafter)
        started = time.perf_counter()
        self._engine.start(self.sequence, self.cache)
        self._seconds = time.perf_counter() - started

    def run_to(self, num_tokens: int) -> Record:
        started = time.perf_counter()
        while self.sequence.num_generated_tokens < num_tokens:
            for _, verification in self._engine.step():  # tokens are on the host then, so clocks are right on a GPU
                self._num_draft_depth += max(verification.tree.depths(), default=0)
        self._seconds += time.perf_counter() - started
        counters, draft = self._engine.counters, self._drafter.counters
        return {
            "num_tokens": self.sequence.num_generated_tokens,
            "seconds": self._seconds,
            "num_steps": counters.num_steps,
            "num_accepted": counters.num_accepted_tokens,
            "draft_depth": self._num_draft_depth,  # the most tokens that could have been accepted
            "num_ngrams": self._reuse.num_accepted_tokens if self._reuse else None,
            "num_rounds": draft.num_rounds,  # forwards with a partial cache
            "step_seconds": dict(counters.step_seconds),
            "draft_seconds": dict(draft.seconds),
        }


def _prompt(options: Options, target: TargetModel) -> list[int]:
    text, prefill = options.text, options.prefill
    if text is None:
        return own_tokens(target, prefill)
    if options.sampled:
        return sampled_tokens(text, target.files, prefill, options.seed)
    return text_tokens(text, target.files, prefill)


def _between(first: Record, last: Record, plain: PlainWindows) -> Record:
    """Return figures between two marks; `alpha` is the paper's equation 4."""
    names = ("num_tokens", "seconds", "num_steps", "num_accepted", "draft_depth", "num_rounds")
    num_tokens, seconds, num_steps, accepted, depth, rounds = (last[name] - first[name] for name in names)
    plain_seconds = plain.seconds(first["num_tokens"], last["num_tokens"])
    has_beta = depth and last["num_ngrams"] is not None
    return {
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "ms_per_token": 1000 * seconds / num_tokens,
        "plain_ms_per_token": 1000 * plain_seconds / num_tokens,
        "speedup": plain_seconds / seconds,
        "alpha": accepted / depth if depth else None,
        "beta": (last["num_ngrams"] - first["num_ngrams"]) / depth if has_beta else None,
        "tokens_per_step": num_tokens / num_steps,  # with bonus tokens and steps without a draft
        "draft_depth": depth / num_steps,
        "rounds_per_step": rounds / num_steps,
        "step_ms": per_step(first["step_seconds"], last["step_seconds"], num_steps),
        "draft_ms": per_step(first["draft_seconds"], last["draft_seconds"], num_steps),
    }


def per_step(first: dict[str, float], last: dict[str, float], num_steps: int) -> dict[str, float]:
    return {name: 1000 * (last[name] - first[name]) / num_steps for name in last}


class PlainWindows:
    """Plain decoding of `size` tokens, without a change of the generation."""

    def __init__(self, target: TargetModel, size: int) -> None:
        self._size, self._engine = size, BenchEngine(target, AutoregressiveDrafter())
        self._measured: list[tuple[int, float, np.ndarray]] = []  # position, ms per token, tokens

    def measure(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Decode plainly from the sequence's end."""
        num_tokens = sequence.num_generated_tokens
        size = min(self._size, sequence.num_remaining_tokens)
        if size == 0 or (self._measured and self._measured[-1][0] == num_tokens):
            return
        plain = sequence.with_output(sequence.output_ids.tolist())
        plain.max_length = len(plain) + size
        self._engine.start(plain, cache.prefix(cache.length))
        seconds = []
        while plain.finish_reason is None:
            started = time.perf_counter()
            [(_, step)] = self._engine.step()  # the token is on the host then, so clocks are right on a GPU
            seconds += [(time.perf_counter() - started) / step.num_steps] * step.num_steps
        self._engine.stop(plain)
        self._measured.append((num_tokens, 1000 * statistics.median(seconds), plain.output_ids[num_tokens:]))

    def compared(self, output_ids: np.ndarray) -> list[bool]:
        windows = ((output_ids[first:][: len(ids)], ids) for first, _, ids in self._measured)
        return [np.array_equal(found, ids[: len(found)]) for found, ids in windows]

    def seconds(self, first: int, last: int) -> float:
        return (
            integral([place for place, *_ in self._measured], [ms for _, ms, _ in self._measured], first, last) / 1000
        )


def integral(positions: list[int], values: list[float], first: int, last: int) -> float:
    """Integrate the piecewise linear curve, constant at both ends, over `[first, last]`."""
    grid = [first, *(position for position in positions if first < position < last), last]
    return float(np.trapezoid(np.interp(grid, positions, values), grid))
