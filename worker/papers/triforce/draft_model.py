"""A small draft model that reads the first and the newest tokens of each sequence (TriForce 4.2, StreamingLLM).

It never sees a position beyond its window: the first tokens stand at 0 to 15, the newest ones behind them. The window
begins anew every `WINDOW` committed tokens. So a model trained on short texts drafts at any length, and its cache
follows from the tokens alone: forwards are row-exact, and a resumed job has the same drafts.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.catalogue import DRAFT_MODEL, ENGINES
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.target.step_costs import seconds_of
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import SequenceRows, chain_rows

NUM_SINKS = 16
WINDOW = 256  # newest tokens that are always read; before it begins anew, up to twice as many
PROBE_REPEATS = 5


@dataclass
class _Context:
    """The cache of one sequence, and the tokens in it."""

    cache: FullKVCache
    token_ids: np.ndarray  # [cache.length]


class DraftModel:
    """A causal language model with the target's vocabulary, and a short cache for each sequence."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._contexts: dict[str, _Context] = {}

    @classmethod
    def load(cls, parts_folder: Path | None, target: TargetModel) -> DraftModel:
        """Load the target's draft model: `draft` in a folder, None for the target's own, or that folder itself.

        Raises ModelError where it does not fit.
        """
        folder = DRAFT_MODEL.find(target.files.name, target.files.path, target.files.fingerprint, parts_folder)
        files = locate_model(str(folder))
        longest = ENGINES["triforce"].draft_length
        if files.max_positions < longest:
            raise ModelError(f"draft model {folder}: it has {files.max_positions} positions; {longest} are needed")
        return cls(target.load_beside(files, longest))

    def start(self, sequence_id: str) -> None:
        """Make room for a sequence."""
        cache = self._model.new_cache(ENGINES["triforce"].draft_length)
        self._contexts[sequence_id] = _Context(cache, np.zeros(0, dtype=np.int64))

    def stop(self, sequence_id: str) -> None:
        del self._contexts[sequence_id]

    def logits(self, requests: dict[str, np.ndarray]) -> list[torch.Tensor]:
        """Logits `[vocab] float32` behind each sequence's `window_of` tokens; sequences share the forwards."""
        for sequence_id, token_ids in requests.items():
            self._roll_back(self._contexts[sequence_id], token_ids)
        found: dict[str, torch.Tensor] = {}
        while waiting := [name for name in requests if name not in found]:
            rows = [self._missing_rows(name, requests[name]) for name in waiting]
            for name, part, outputs in zip(waiting, rows, self._model.verify(rows), strict=True):
                context = self._contexts[name]
                context.cache.advance(len(part))
                if context.cache.length == len(requests[name]):
                    context.token_ids = requests[name]
                    found[name] = outputs.logits[-1].clone()  # a forward's logits hold until the next one
        return [found[name] for name in requests]

    def token_seconds(self) -> float:
        """Seconds of one drafted token, measured."""
        self.start("probe")
        token_ids = np.zeros(NUM_SINKS + WINDOW + PROBE_REPEATS, dtype=np.int64)
        self.logits({"probe": token_ids[:-PROBE_REPEATS]})
        texts = [{"probe": token_ids[: len(token_ids) - num_left]} for num_left in range(PROBE_REPEATS - 1, -1, -1)]
        seconds = [seconds_of(self._model, functools.partial(self.logits, text)) for text in texts]
        self.stop("probe")
        return statistics.median(seconds)

    def _missing_rows(self, sequence_id: str, token_ids: np.ndarray) -> SequenceRows:
        cache = self._contexts[sequence_id].cache
        return chain_rows(cache, token_ids[cache.length :].tolist())

    @staticmethod
    def _roll_back(context: _Context, token_ids: np.ndarray) -> None:
        """Forget what the cache holds beyond the tokens that are wanted; the last one's row is always run."""
        num_common = min(len(context.token_ids), len(token_ids) - 1)
        differs = np.nonzero(context.token_ids[:num_common] != token_ids[:num_common])[0]
        context.cache.roll_back(int(differs[0]) if len(differs) else num_common)
        context.token_ids = token_ids[: context.cache.length]


def window_of(token_ids: np.ndarray, num_committed: int) -> np.ndarray:
    """Return the tokens that the draft model reads of a sequence and its chain.

    The committed tokens decide where the window begins.
    """
    start = max(NUM_SINKS, (num_committed // WINDOW - 1) * WINDOW)
    return np.concatenate([token_ids[:NUM_SINKS], token_ids[start:]])
