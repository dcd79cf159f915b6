"""Errors of a GPU in calls of real parts, on a CPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swiftbatch.worker.drafters.griffin.draft_forwards import NativeRows
from swiftbatch.worker.drafters.griffin.draft_input import Features, TorchRoom
from swiftbatch.worker.drafters.mtp.mtp import NativePredictorRows
from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.kv.sparse_cache import Entries
from swiftbatch.worker.sampling.batch_sampler import NativeBatchSampler

PARTS: dict[type, tuple[str, ...]] = {  # those that may take memory of a GPU in a step
    NativeForwards: ("run", "read", "check", "queries", "logits", "_draw_chains"),
    NativeBatchSampler: ("walks", "top_candidates", "logprobs"),
    NativeRows: ("run",),
    NativePredictorRows: ("run",),
    TorchRoom: ("rank",),
    Features: ("put",),
    DecodingHeads: ("logits",),
    Entries: ("copy", "gather", "average", "replace"),
}


def full_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class Faults:
    """Raises `error()` in one call of the parts, before or after its work, once it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Callable[[], Exception] = full_memory) -> None:
        self._error, self._rng = error, random.Random(0)
        self._num_left: int | None = None  # calls until the error; None: not armed
        self.hit: set[str] = set()
        for part, names in PARTS.items():
            for name in names:
                patch.setattr(part, name, self.around(getattr(part, name), f"{part.__name__}.{name}"))

    def arm(self, most_calls: int = 6) -> None:
        self._num_left = self._rng.randrange(most_calls)

    def disarm(self) -> None:
        self._num_left = None

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            is_due = self._num_left == 0
            if self._num_left is not None:
                self._num_left = None if is_due else self._num_left - 1
            if is_due:
                self.hit.add(name)
                if self._rng.random() < 0.5:
                    raise self._error()
            found = call(*args, **kwargs)
            if is_due:
                raise self._error()
            return found

        return faulty
