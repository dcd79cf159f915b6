"""Agreement of what the target draws with a partial cache and with all keys."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.compared_caches import PARTIAL_CACHES
from bench.options import Floats, Ints, Names, one_of
from bench.tables import Record
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchError, BenchOptions, check_length, read_tokens, text_tokens
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import ScanKVCache
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.batch_sampler import BatchSampler, Sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

CACHES = PARTIAL_CACHES | {"scan": ScanKVCache}


class Options(BenchOptions):
    """Options; `caches` are NAME:BUDGET, `num_tokens` are drawn after each position."""

    text: Path
    caches: Names = ("scan:256", "summary:2048")  # name:budget
    positions: Ints = (4096,)
    num_tokens: int = 256
    temperatures: Floats = (1.0,)
    min_p: float = 0.1
    seed: int = 0


def run(options: Options) -> Iterator[Record]:
    """Count how often the model draws the same token with a partial cache as with all keys.

    The time of a round is the median of a row's forward with that cache.

    \b
    Example:
      python -m bench agreement --caches scan:256,streaming:512 --positions 16384 --text book.txt --json agreement.jsonl
    """
    files, highest = locate_model(options.model), max(options.positions)
    for entry in options.caches:
        one_of(CACHES, entry.partition(":")[0])
    check_length(files, highest, options.num_tokens)
    target = options.load(files)
    if any(entry.startswith("scan:") for entry in options.caches) and target.forwards.team is None:
        raise BenchError(
            f"keys are scanned by compiled kernels alone, and {files.name} runs on {target.forwards.numerics}"
        )
    text = text_tokens(options.text, files, highest)
    full = target.new_cache(highest + options.num_tokens)
    for position in sorted(options.positions):
        read_tokens(target, full, text[:position], [])
        for temperature in options.temperatures:
            yield from _Comparison(target, options, full, text[:position], temperature).records()
            full.roll_back(position - 1)


class _Comparison:
    """Plain decoding; before each token every cache draws its own."""

    def __init__(
        self, target: TargetModel, options: Options, full: FullKVCache, text: list[int], temperature: float
    ) -> None:
        sampling = SamplingParams(
            max_tokens=options.num_tokens,
            temperature=temperature,
            min_p=options.min_p,
            seed=options.seed,
            ignore_eos=True,
        )
        self._target, self._full, self._position = target, full, len(text)
        self._sequence = Sequence("agreement", text, sampling, target.vocab_size, target.device)
        self._batch_sampler: BatchSampler = target.forwards.new_batch_sampler()
        self._sampler: Sampler = self._batch_sampler.sampler(self._sequence)
        self._caches = {entry: _new_cache(target, entry, self._sequence) for entry in options.caches}
        self._alike: dict[str, list[bool]] = {entry: [] for entry in options.caches}
        self._seconds: dict[str, list[float]] = {entry: [] for entry in (*options.caches, "")}

    def records(self) -> list[Record]:
        for _ in range(self._sequence.num_remaining_tokens):
            self._step()
        plain = statistics.median(self._seconds[""])
        return [
            {
                "cache": entry,
                "position": self._position,
                "temperature": self._sequence.sampling.temperature,
                "share_alike": float(np.mean(alike)),
                "round_ms": 1000 * statistics.median(self._seconds[entry]),
                "plain_ms": 1000 * plain,
            }
            for entry, alike in self._alike.items()
        ]

    def _step(self) -> None:
        newest = int(self._sequence.token_ids[-1])
        drawn = {entry: self._drawn_with(entry, cache, newest) for entry, cache in self._caches.items()}
        started = time.perf_counter()
        [outputs] = self._target.verify([tree_rows(self._full, newest, DraftTree())])
        self._seconds[""].append(time.perf_counter() - started)
        token_id = self._drawn(outputs.logits)
        for entry, found in drawn.items():
            self._alike[entry].append(found == token_id)
        self._full.commit([])
        self._sequence.extend([token_id])

    def _drawn_with(self, entry: str, cache: SparseCache, newest: int) -> int:
        cache.follow(self._full, self._queries)
        started = time.perf_counter()
        [outputs] = self._target.check([partial_rows(cache, newest, len(self._sequence) - 1, DraftTree())])
        self._seconds[entry].append(time.perf_counter() - started)
        return self._drawn(outputs.logits)

    def _drawn(self, logits: torch.Tensor) -> int:
        [walk] = self._batch_sampler.walks([self._sampler], [DraftTree()], [logits])
        return int(walk.drawn[0])

    def _queries(self, position: int) -> torch.Tensor:
        with self._full.replayed(position) as before:
            return self._target.queries(before, int(self._sequence.token_ids[position]))


def _new_cache(target: TargetModel, entry: str, sequence: Sequence) -> SparseCache:
    name, _, budget = entry.partition(":")
    return CACHES[name](target.cache_shape, int(budget), sequence)
