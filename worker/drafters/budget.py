"""How many draft nodes pay: the target's measured step costs against the running acceptance.

Nodes are proposed best first, so the share of steps in which node i was accepted tells for every n what n nodes would
have brought. More rows cost little in a short cache and much in a long one; the choice follows both.
"""

from __future__ import annotations

import bisect
import functools
import time
from dataclasses import dataclass

import numpy as np
import torch

from worker.caches.full import MAX_TREE_NODES, FullKVCache
from worker.target.target import TargetModel
from worker.target.tiles import BLOCK, TILE_ROWS, tree_rows
from worker.tree import DraftTree

ROW_COUNTS = (1, 2, 4, 8, 16, 32)
PROBE_LENGTHS = (BLOCK, 8192, 49_152)
PROBE_BYTES = 1 << 28  # of cache, at most
PROBE_REPEATS = 3
LONG_SECONDS = 0.03  # of a forward: one that takes longer is timed once
NODE_CHOICES = (1, 3, 5, 7, 11, 15, 23, 31)

PRIOR_ACCEPTANCE = 0.6 * 0.75 ** np.arange(TILE_ROWS)  # of node i, before anything was seen
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # that the prior counts for: short generations learn faster than at the final rate
EXPLORE_EVERY = 24  # steps between two looks at one size more


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a forward on a grid of cache lengths and row counts; linear between and beyond."""

    lengths: tuple[int, ...]
    seconds: np.ndarray  # [num_lengths, len(ROW_COUNTS)]

    def at(self, num_rows: int, length: int) -> float:
        """Seconds of one sequence's forward over `num_rows` rows behind `length` cached positions."""
        by_length = self._by_rows[min(num_rows, ROW_COUNTS[-1])]
        if len(self.lengths) == 1:
            return by_length[0]
        i = max(1, min(bisect.bisect_left(self.lengths, length), len(self.lengths) - 1))
        slope = (by_length[i] - by_length[i - 1]) / (self.lengths[i] - self.lengths[i - 1])
        return by_length[i - 1] + max(0.0, slope) * (length - self.lengths[i - 1])

    @functools.cached_property
    def _by_rows(self) -> list[list[float]]:
        """Seconds for every number of rows and measured length: plain numbers, since plans ask at every step."""
        numbers = range(ROW_COUNTS[-1] + 1)
        return [[float(np.interp(number, ROW_COUNTS, row)) for row in self.seconds] for number in numbers]

    def forward_seconds(self, num_rows: int, length: int, num_sequences: int) -> float:
        """Seconds of a forward of `num_rows` rows for each of several sequences, `length` positions cached.

        Linear layers are shared by all rows; attention to its own cache is each sequence's own.
        """
        own = self.at(num_rows, length) - self.at(num_rows, 0)
        return self.at(num_rows * num_sequences, 0) + num_sequences * own

    def replay_seconds(self, start: int, end: int) -> float:
        """Seconds to run known tokens at positions `[start, end)` through the target, in full tiles."""
        num_tiles = max(0, end - start) / TILE_ROWS
        return num_tiles * (self.at(TILE_ROWS, start) + self.at(TILE_ROWS, end)) / 2


@functools.cache
def measure_step_costs(target: TargetModel) -> StepCosts:
    """Time forwards over an empty cache of several lengths, once per target; a second on the embedded model."""
    cache, lengths = _probe_cache(target)
    seconds = np.zeros((len(lengths), len(ROW_COUNTS)))
    for i, length in enumerate(lengths):
        cache.roll_back(0)
        cache.advance(length)
        for j, num_rows in enumerate(ROW_COUNTS):
            rows = tree_rows(cache, 0, DraftTree.chain([0] * (num_rows - 1)))
            times = []
            for _ in range(PROBE_REPEATS):
                target.synchronize()
                started = time.perf_counter()
                target.verify([rows])
                target.synchronize()
                times.append(time.perf_counter() - started)
                if times[-1] > LONG_SECONDS:
                    break
            seconds[i, j] = min(times)
    return StepCosts(lengths, np.maximum.accumulate(seconds, axis=1))


def _probe_cache(target: TargetModel) -> tuple[FullKVCache, tuple[int, ...]]:
    """A cache of zeros, and the lengths to time in it; where it would be large, all layers share the memory of one."""
    shape, num_bytes = target.cache_shape, target.cache_shape.bytes_per_position()
    if not target.is_offloaded:
        num_bytes //= shape.num_layers
    longest = min(PROBE_BYTES // num_bytes, target.files.max_positions - TILE_ROWS)
    lengths = tuple(length for length in PROBE_LENGTHS if length <= longest) or (BLOCK,)
    capacity = max(lengths) + TILE_ROWS
    if target.is_offloaded or capacity * shape.bytes_per_position() <= PROBE_BYTES:
        cache = target.new_cache(capacity)
        cache.clear()
        return cache, lengths
    size = (2, shape.num_kv_heads, capacity + MAX_TREE_NODES, shape.head_dim)
    layer = torch.zeros(size, dtype=shape.dtype, device=shape.device)
    return FullKVCache(shape, capacity, layer.expand(shape.num_layers, *size)), lengths


@dataclass(frozen=True)
class BudgetChoice:
    """A number of draft nodes for each sequence, and the tokens per second of all that it promises."""

    num_nodes: int
    rate: float


class NodeBudget:
    """Chooses the number of draft nodes that gives most tokens per second."""

    def __init__(self, costs: StepCosts, prior_acceptance: np.ndarray = PRIOR_ACCEPTANCE) -> None:
        self._costs = costs
        self._acceptance = prior_acceptance.copy()  # [TILE_ROWS] running share of steps that accepted node i
        self._num_steps = 0

    def state(self) -> np.ndarray:
        """What was learned: acceptance per node, then the number of steps, `[TILE_ROWS + 1] float64`."""
        return np.array([*self._acceptance, self._num_steps])

    def restore(self, state: np.ndarray) -> None:
        """Take back what `state` returned. Unfit arrays raise ValueError and change nothing."""
        if state.shape != (TILE_ROWS + 1,) or state.dtype != np.float64 or not np.isfinite(state).all():
            raise ValueError(f"node budget: found {state.dtype} {state.shape}, expected float64 ({TILE_ROWS + 1},)")
        self._acceptance, self._num_steps = state[:TILE_ROWS].copy(), int(state[TILE_ROWS])

    def observe(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from one verified tree whose accepted nodes are `path`."""
        if num_draft_tokens == 0:
            return
        self._num_steps += 1
        accepted = np.zeros(TILE_ROWS)
        accepted[[node for node in path if node < TILE_ROWS]] = 1.0
        seen = slice(0, min(num_draft_tokens, TILE_ROWS))
        rate = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_steps))
        self._acceptance[seen] += rate * (accepted[seen] - self._acceptance[seen])

    def max_nodes(self, length: int, num_sequences: int, overhead: float) -> int:
        """Nodes for each of `num_sequences` sequences that share a forward, at `length` cached tokens.

        `overhead` is what a step costs beside the forward, in seconds.
        """
        return self.best(length, num_sequences, overhead).num_nodes

    def best(
        self, length: int, num_sequences: int, overhead: float, node_seconds: float = 0.0, max_nodes: int = TILE_ROWS
    ) -> BudgetChoice:
        """The same with its rate; `node_seconds` is what proposing takes for every node of every sequence."""
        room = max(1, min(max_nodes, TILE_ROWS // num_sequences - 1))
        choices = [nodes for nodes in NODE_CHOICES if nodes <= room] or [room]
        gains = 1.0 + np.cumsum(self._acceptance)
        rates = []
        for nodes in choices:
            proposing = overhead + nodes * num_sequences * node_seconds
            forward = self._costs.forward_seconds(nodes + 1, length, num_sequences)
            rates.append(gains[nodes - 1] / (forward + proposing))
        best = int(np.argmax(rates))
        if self._num_steps % EXPLORE_EVERY == EXPLORE_EVERY - 1:
            best = min(best + 1, len(choices) - 1)
        return BudgetChoice(choices[best], num_sequences * float(rates[best]))
