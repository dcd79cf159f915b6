"""Ways to draft: no drafts, trees of a drafter, and any drafter whose gain only trials can tell."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.worker.drafters.choice.tree_sizes import TreeSizes, forward_seconds
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, Learner, ReadRows, Verified
from swiftbatch.worker.drafters.tree_drafter import TreeDrafter
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

SAME_LENGTH = 1 / 16  # of a text: it changes a step's time by little


class DraftWay(Learner):
    """One way to draft. `update_all` gets the steps that it proposed for, `hear` all others."""

    draft_kind = "tree"
    wants_candidates = False  # it learns from the step that it proposed for
    expected_seconds: float | None = None  # forwards of that step; None if unknown

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Start a sequence, as `Drafter.start` does."""

    @abstractmethod
    def promise(self, requests: list[DraftRequest], beside: float) -> float | None:
        """Return the expected tokens per second, summed over sequences; `beside` is a step's time outside forwards.

        Returns 0 if the way can draft nothing now, and None if only a trial can tell.
        """

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree] | None:
        """Propose for all sequences of the coming step, or return None if the way is not ready for them yet."""

    def hear(self, verified: Many[Verified]) -> None:
        """Learn from a step that another way proposed for, or from several plain steps."""


class PlainWay(DraftWay):
    """Plain decoding, where several steps may pass in one call."""

    draft_kind = "none"

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._known_for = (0, 0)  # sequences, and the length of the longest, that `expected_seconds` are for

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        self.propose(requests)
        assert self.expected_seconds is not None
        return len(requests) / max(self.expected_seconds + beside, self.expected_seconds / 2)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        number, longest = len(requests), max(len(request.sequence) for request in requests)
        if number != self._known_for[0] or abs(longest - self._known_for[1]) > SAME_LENGTH * longest:
            self._known_for = number, longest  # to ask for it takes a tenth of a short step
            self.expected_seconds = forward_seconds(self._costs.as_routed(), requests, [0] * number)
        return [DraftTree()] * len(requests)


class TreeWay(DraftWay):
    """Trees of a drafter, each of the size with the most tokens per second."""

    def __init__(self, drafter: TreeDrafter, costs: StepCosts) -> None:
        self.drafter, self.sizes = drafter, TreeSizes(costs)
        self.needs_top_k = drafter.needs_top_k
        self._beside = 0.0

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.drafter.start(sequence, cache)

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        self._beside = beside
        return self.sizes.plan(requests, beside)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.sized(requests, self.sizes.sizes(requests, self._beside))

    def sized(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        """Propose trees of at most these numbers of nodes."""
        self.wants_candidates = self.needs_top_k and any(sizes)
        self.expected_seconds = self.sizes.forward_seconds(requests, sizes)
        return self.drafter.sized_trees(requests, sizes)

    def update_all(self, verified: Many[Verified]) -> None:
        self.sizes.observe(verified)
        self.drafter.update_all(verified)

    def hear(self, verified: Many[Verified]) -> None:
        self.drafter.update_all(verified)

    def learn(self, rows: ReadRows) -> None:
        self.drafter.learn(rows)

    def stop(self, sequence: Sequence) -> None:
        self.sizes.forget(sequence)
        self.drafter.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.drafter.state(sequence) | {"tree_acceptance": self.sizes.state(sequence)}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = self.sizes.state(sequence)
        if "tree_acceptance" in state:
            self.sizes.restore(sequence, state["tree_acceptance"])
        try:
            self.drafter.restore(sequence, state)
        except ValueError:
            self.sizes.restore(sequence, before)
            raise


class MeasuredWay(DraftWay):
    """A drafter that plans its own drafts; only trials show how much faster it is."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs_hidden = drafter.needs_hidden

    @property
    def draft_kind(self) -> str:  # type: ignore[override]
        return self.drafter.draft_kind

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.drafter.start(sequence, cache)

    def promise(self, requests: list[DraftRequest], beside: float) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.drafter.propose(requests)

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self.drafter.read(sequence, position, hidden)

    def update_all(self, verified: Many[Verified]) -> None:
        self.drafter.update_all(verified)

    def hear(self, verified: Many[Verified]) -> None:
        for sequence, verification in verified:
            if verification.hidden is not None:
                position = len(sequence) - len(verification.committed_ids) - 1
                self.drafter.read(sequence, position, verification.hidden)

    def stop(self, sequence: Sequence) -> None:
        self.drafter.stop(sequence)
