"""The forwards of GRIFFIN's draft model behind the sequences of a worker, and what it keeps of each.

Its keys and values lie in a cache of one layer, with the rows of the window in it (see `draft_input.py`). Its rows are
exact, as the target's are (see `draft_rows.py`), and the features come from the target's rows, so what it says follows
from the tokens alone. Where features are not known, behind a prompt or a resume, the target runs the window's tokens
once more.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drawing.draft_tree import ROOT, DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.papers.griffin.draft_input import (
    NOTHING,
    NUM_SINKS,
    WINDOW,
    Candidates,
    DraftRows,
    Room,
    entry_of,
    position_of,
    regressed_place,
    window_start,
)
from swiftbatch.worker.target.step_costs import seconds_of
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import SequenceRows, tree_rows

if TYPE_CHECKING:
    from swiftbatch.worker.papers.griffin.draft_rows import GriffinRows

PROBE_REPEATS = 5
PROBE_NODES = 8
PROBE_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, seed=0)


@dataclass(frozen=True)
class Level:
    """The newest nodes of a tree below what `follow` took in."""

    sequence: Sequence
    tree: DraftTree
    first: int  # of the new nodes; their parents were in the level before


@dataclass
class _Context:
    """One sequence as the draft model knows it."""

    target_cache: FullKVCache
    room: Room
    start: int = NUM_SINKS  # position at which the window begins


class DraftForwards(Protocol):
    """A draft model over the target's features, and what it keeps of each sequence."""

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        """Make room for a sequence whose target cache this is."""

    def stop(self, sequence_id: str) -> None:
        """Forget a sequence."""

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Take the target's features `[num_rows, hidden]` at a position and those behind it."""

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        """Take in what was committed; returns what may follow each sequence's newest token."""

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        """Return the candidates behind each of the new nodes of some trees."""


class GriffinForwards:
    """Draft model, target, and a context for each sequence."""

    def __init__(self, rows: GriffinRows, target: TargetModel) -> None:
        self._rows = rows
        self._target = target
        self._contexts: dict[str, _Context] = {}

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        """Make room for a sequence whose target cache this is."""
        self._contexts[sequence.sequence_id] = _Context(target_cache, self._rows.new_room(sequence))

    def stop(self, sequence_id: str) -> None:
        del self._contexts[sequence_id]

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Keep the target's features `[num_rows, hidden]` at a position and those behind it."""
        self._contexts[sequence_id].room.features.put(position, hidden)

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        """Take in what was committed; returns what may follow each sequence's newest token."""
        for sequence in sequences:
            self._open_window(self._contexts[sequence.sequence_id], len(sequence))
        found: dict[str, Candidates] = {}
        while waiting := [sequence for sequence in sequences if sequence.sequence_id not in found]:
            parts = [self._missing_rows(sequence) for sequence in waiting]
            for sequence, part, candidates in zip(waiting, parts, self._rows.run(parts), strict=True):
                part.room.cache.advance(part.num_known)  # the newest token's row stays a root, like the target's
                if candidates:
                    found[sequence.sequence_id] = candidates[0]
        return [found[sequence.sequence_id] for sequence in sequences]

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        """Return the candidates behind each of the new nodes of some trees."""
        return self._rows.run([self._level_rows(level) for level in levels])

    def level_seconds(self) -> float:
        """Seconds of one level of a few nodes, measured."""
        room = self._rows.new_room(Sequence("probe", [0], PROBE_PARAMS, self._target.vocab_size, self._target.device))
        room.cache.clear()
        room.cache.advance(NUM_SINKS + WINDOW)
        rows = tree_rows(room.cache, 0, DraftTree([0] * PROBE_NODES, [ROOT] * PROBE_NODES)).part(1, 1 + PROBE_NODES)
        parts = [DraftRows(room, rows, [NOTHING] * PROBE_NODES, [[0]] * PROBE_NODES, 1)]
        forward = functools.partial(self._rows.run, parts)
        return statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))

    def _open_window(self, context: _Context, num_committed: int) -> None:
        start = window_start(num_committed)
        if start != context.start:
            context.start = start
            context.room.cache.roll_back(min(context.room.cache.length, NUM_SINKS))

    def _missing_rows(self, sequence: Sequence) -> DraftRows:
        """The next rows that are not in the draft model's cache: at most a block, sinks and window apart."""
        context = self._contexts[sequence.sequence_id]
        room, last = context.room, len(sequence) - 1
        first = position_of(room.cache.length, context.start)
        end = NUM_SINKS if first < NUM_SINKS else len(sequence)
        token_ids = sequence.token_ids[first:end][: BLOCK - room.cache.length % BLOCK].tolist()
        rows = tree_rows(room.cache, token_ids[0], DraftTree.chain(token_ids[1:]))
        is_last = rows.first_entry + len(rows) == entry_of(last, context.start) + 1
        return DraftRows(room, rows, self._known_places(sequence, rows), [[]] if is_last else [])

    def _known_places(self, sequence: Sequence, rows: SequenceRows) -> list[int]:
        """Find the places of the features in front of tokens of the text."""
        context = self._contexts[sequence.sequence_id]
        features, position = context.room.features, position_of(rows.first_entry, context.start)
        start, end = max(0, position - 1), position - 1 + len(rows)
        if not features.holds(start, end):
            last = min(NUM_SINKS, len(sequence)) - 1 if position < NUM_SINKS else len(sequence) - 1
            features.put(start, self._replay(sequence, context.target_cache, start, last))
        return [NOTHING] * (position == 0) + features.places(start, end)

    def _replay(self, sequence: Sequence, cache: FullKVCache, start: int, end: int) -> torch.Tensor:
        """The target's final hidden states at positions `[start, end)`: `[end - start, hidden]`."""
        size, token_ids = self._target.hidden_size, sequence.token_ids
        hidden = [torch.zeros(0, size, dtype=self._target.dtype, device=self._target.device)]
        with cache.replayed(start, end - start) as before:
            while before.length < end:
                hidden.append(self._target.read(before, token_ids[before.length : end].tolist()))
        return torch.cat(hidden)

    def _level_rows(self, level: Level) -> DraftRows:
        room, tree = self._contexts[level.sequence.sequence_id].room, level.tree
        rows = tree_rows(room.cache, int(level.sequence.token_ids[-1]), tree).part(1 + level.first, 1 + len(tree))
        places = [regressed_place(1 + parent) for parent in tree.parents[level.first :]]  # ROOT is the row in front
        return DraftRows(room, rows, places, _paths(tree)[level.first :], 1 + level.first)


def _paths(tree: DraftTree) -> list[list[int]]:
    """Tokens from the root, which is not among them, down to each node."""
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*([] if parent == ROOT else paths[parent]), token_id])
    return paths
