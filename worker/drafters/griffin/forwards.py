"""The forwards of GRIFFIN's draft model behind the sequences of a worker, and what it keeps of each.

Its keys and values lie in a cache of one layer, with the rows of the window in it (see `window.py`). Its rows
are exact, as the target's are (see `rows.py`), and the features come from the target's rows, so what it says follows
from the tokens alone: where features are not known, behind a prompt or a resume, the target runs the window's
tokens once more.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field

import torch

from worker.caches.full import FullKVCache
from worker.drafters.griffin.rows import GriffinRows
from worker.drafters.griffin.window import NUM_ENTRIES, NUM_SINKS, WINDOW, entry_of, position_of, window_start
from worker.sequence import Sequence
from worker.target.step_costs import seconds_of
from worker.target.target import TargetModel
from worker.target.tiles import SequenceRows, chain_rows, tree_rows
from worker.tree import DraftTree

PROBE_REPEATS = 5
PROBE_NODES = 8


@dataclass(frozen=True)
class GriffinOutputs:
    """What the draft model says of one sequence's rows."""

    regressed: torch.Tensor  # [num_rows, hidden] to stand in for the target's features in the next rows
    logits: torch.Tensor  # [num_rows, vocab] float32


@dataclass
class _Features:
    """The target's final hidden states at consecutive positions of one sequence."""

    first: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)  # each [hidden]

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def put(self, position: int, hidden: torch.Tensor) -> None:
        """Keep `hidden [num_rows, hidden]` of `position` and those behind it; what is not next to it is forgotten."""
        if position != self.end:
            self.first, self.rows = position, []
        self.rows += hidden.unbind()
        num_old = len(self.rows) - NUM_ENTRIES
        if num_old > 0:
            self.first, self.rows = self.first + num_old, self.rows[num_old:]

    def holds(self, start: int, end: int) -> bool:
        return self.first <= start and end <= self.end

    def between(self, start: int, end: int) -> torch.Tensor:
        """`[end - start, hidden]`."""
        return torch.stack(self.rows[start - self.first : end - self.first])


@dataclass
class _Context:
    """One sequence as the draft model knows it."""

    target_cache: FullKVCache
    cache: FullKVCache  # rows of the window but the newest token's, which every draft runs anew
    start: int = NUM_SINKS  # position at which the window begins
    features: _Features = field(default_factory=_Features)


class GriffinForwards:
    """Draft model, target, and a context for each sequence."""

    def __init__(self, rows: GriffinRows, target: TargetModel) -> None:
        self._rows = rows
        self._target = target
        self._contexts: dict[str, _Context] = {}

    def start(self, sequence_id: str, target_cache: FullKVCache) -> None:
        """Make room for a sequence whose target cache this is."""
        self._contexts[sequence_id] = _Context(target_cache, FullKVCache(self._rows.cache_shape, NUM_ENTRIES))

    def stop(self, sequence_id: str) -> None:
        del self._contexts[sequence_id]

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Keep the target's features `[num_rows, hidden]` at a position and those behind it."""
        self._contexts[sequence_id].features.put(position, hidden)

    def follow(self, sequences: list[Sequence]) -> list[GriffinOutputs]:
        """Take in what was committed; returns the outputs at each sequence's newest token, one row each."""
        for sequence in sequences:
            self._open_window(self._contexts[sequence.sequence_id], len(sequence))
        found: dict[str, GriffinOutputs] = {}
        while waiting := [sequence for sequence in sequences if sequence.sequence_id not in found]:
            rows = [self._missing_rows(sequence) for sequence in waiting]
            features = [self._features(*pair) for pair in zip(waiting, rows, strict=True)]
            for sequence, part, outputs in zip(waiting, rows, self._forward(rows, features), strict=True):
                cache = self._contexts[sequence.sequence_id].cache
                is_last = part.first_entry + len(part) == self._num_rows(sequence)
                cache.advance(len(part) - is_last)  # the newest token's row stays a root, like the target's
                if is_last:
                    found[sequence.sequence_id] = GriffinOutputs(outputs.regressed[-1:], outputs.logits[-1:])
        return [found[sequence.sequence_id] for sequence in sequences]

    def expand(self, levels: list[tuple[Sequence, DraftTree, int, torch.Tensor]]) -> list[GriffinOutputs]:
        """Run the newest nodes of trees below what `follow` took in: each tree with its first new node's index.

        The fourth of each is the regressed features of the new nodes' parents, `[num_new, hidden]`.
        """
        rows = []
        for sequence, tree, first, _ in levels:
            cache = self._contexts[sequence.sequence_id].cache
            rows.append(tree_rows(cache, int(sequence.token_ids[-1]), tree).part(1 + first, 1 + len(tree)))
        return self._forward(rows, [regressed for *_, regressed in levels])

    def level_seconds(self) -> float:
        """Seconds of one forward over a few nodes, measured."""
        cache = FullKVCache(self._rows.cache_shape, NUM_ENTRIES)
        cache.clear()
        cache.advance(NUM_SINKS + WINDOW)
        rows = tree_rows(cache, 0, DraftTree([0] * PROBE_NODES, [-1] * PROBE_NODES)).part(1, 1 + PROBE_NODES)
        features = torch.zeros(PROBE_NODES, self._target.hidden_size, device=self._target.device)
        forward = functools.partial(self._forward, [rows], [features.to(self._target.dtype)])
        return statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))

    def _open_window(self, context: _Context, num_committed: int) -> None:
        start = window_start(num_committed)
        if start != context.start:
            context.start = start
            context.cache.roll_back(min(context.cache.length, NUM_SINKS))

    def _num_rows(self, sequence: Sequence) -> int:
        """Rows of a sequence's window, the newest token's included."""
        return entry_of(len(sequence) - 1, self._contexts[sequence.sequence_id].start) + 1

    def _missing_rows(self, sequence: Sequence) -> SequenceRows:
        """The next rows that are not in the draft model's cache: at most a tile, sinks and window apart."""
        context = self._contexts[sequence.sequence_id]
        first = position_of(context.cache.length, context.start)
        end = NUM_SINKS if first < NUM_SINKS else len(sequence)
        return chain_rows(context.cache, sequence.token_ids[first:end].tolist())

    def _features(self, sequence: Sequence, rows: SequenceRows) -> torch.Tensor:
        """Features in front of the rows' tokens, `[num_rows, hidden]`; the text's first token has none: zeros."""
        context = self._contexts[sequence.sequence_id]
        position = position_of(rows.first_entry, context.start)
        start, end = max(0, position - 1), position - 1 + len(rows)
        if not context.features.holds(start, end):
            last = min(NUM_SINKS, len(sequence)) - 1 if position < NUM_SINKS else len(sequence) - 1
            context.features.put(start, self._replay(sequence, context.target_cache, start, last))
        found = context.features.between(start, end) if end > start else self._nothing(0)
        return torch.cat([self._nothing(1), found]) if position == 0 else found

    def _nothing(self, num_rows: int) -> torch.Tensor:
        size = self._target.hidden_size
        return torch.zeros(num_rows, size, dtype=self._target.dtype, device=self._target.device)

    def _replay(self, sequence: Sequence, cache: FullKVCache, start: int, end: int) -> torch.Tensor:
        """The target's final hidden states at positions `[start, end)`: `[end - start, hidden]`."""
        token_ids = sequence.token_ids
        hidden = [self._nothing(0)]
        with cache.replayed(start, end - start) as before:
            while before.length < end:
                hidden.append(self._target.read(before, token_ids[before.length : end].tolist()))
        return torch.cat(hidden)

    def _forward(self, groups: list[SequenceRows], features: list[torch.Tensor]) -> list[GriffinOutputs]:
        """Run rows of several sequences with the features in front of them, each `[num_rows, hidden]`."""
        regressed, logits = self._rows.run(groups, torch.cat(features))
        sizes = [len(group) for group in groups]
        split = zip(regressed.split(sizes), logits.split(sizes), strict=True)
        return [GriffinOutputs(*outputs) for outputs in split]
