"""Prompt lookup (Saxena 2023): repeat the tokens that followed an earlier match of the last ones."""

from __future__ import annotations

from pathlib import Path

from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter, with_trees
from swiftbatch.worker.drafters.drafter_interface import TreeDrafter
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

MATCH_LENGTHS = (3, 2, 1)  # matching tokens, longest first


class NGramIndex:
    """Index of the position after each n-gram's latest occurrence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_indexed = 0  # tokens whose preceding n-grams are indexed
        self._followers: dict[int, dict[int, int]] = {
            n: {} for n in MATCH_LENGTHS
        }  # n -> n-gram -> follower's position

    def catch_up(self, sequence: Sequence) -> None:
        first = max(self._num_indexed - max(MATCH_LENGTHS), 0)
        token_ids = sequence.token_ids[first:].tolist()
        for position in range(self._num_indexed, len(sequence)):
            end = position - first
            for n in MATCH_LENGTHS:
                if position >= n:
                    self._followers[n][self._key(token_ids[end - n : end])] = position
        self._num_indexed = len(sequence)

    def match(self, sequence: Sequence) -> int | None:
        """Return the position after the latest earlier occurrence of the longest final n-gram that occurred earlier."""
        for n in MATCH_LENGTHS:
            if len(sequence) > n:
                position = self._followers[n].get(self._key(sequence.token_ids[-n:].tolist()))
                if position is not None:
                    return position
        return None

    def _key(self, token_ids: list[int]) -> int:
        """Return an n-gram as one integer, which takes less memory than a tuple."""
        key = 0
        for token_id in token_ids:
            key = key * self._vocab_size + token_id
        return key


def prompt_lookup(target: TargetModel, costs: Costs, parts_folder: Path | None) -> ChoosingDrafter:
    return with_trees(PromptLookupDrafter(target), costs)


class PromptLookupDrafter(TreeDrafter):
    """Proposes the tokens after the latest match of the last three tokens, else of the last two, else of the last."""

    def __init__(self, target: TargetModel) -> None:
        self._vocab_size = target.vocab_size
        self._indexes: dict[str, NGramIndex] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        index = self._indexes[sequence.sequence_id] = NGramIndex(self._vocab_size)
        index.catch_up(sequence)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        start = self._indexes[sequence.sequence_id].match(sequence)
        num_nodes = min(max_nodes, max_depth)
        if start is None or num_nodes < 1:
            return DraftTree()
        return DraftTree.chain(sequence.token_ids[start : start + num_nodes].tolist())

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self._indexes[sequence.sequence_id].catch_up(sequence)

    def stop(self, sequence: Sequence) -> None:
        del self._indexes[sequence.sequence_id]
