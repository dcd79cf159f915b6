"""How many draft nodes a step may verify."""

from __future__ import annotations

from dataclasses import dataclass

from worker.tiles import TILE_ROWS


@dataclass(frozen=True)
class NodeBudget:
    """Draft nodes by length: a row's attention costs little in a short cache and much in a long one."""

    steps: tuple[tuple[int, int], ...] = ((16_384, 15), (1 << 62, 7))  # (up to this length, nodes)

    def max_nodes(self, length: int, num_sequences: int) -> int:
        """Nodes for one of `num_sequences` sequences that share a forward, at `length` tokens."""
        nodes = next(nodes for bound, nodes in self.steps if length <= bound)
        return max(1, min(nodes, TILE_ROWS // num_sequences - 1))
