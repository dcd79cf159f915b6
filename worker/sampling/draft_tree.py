"""The draft tree: what a drafter proposes and the target verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = -1


@dataclass(slots=True)
class DraftTree:
    """Candidate continuations as a tree, parents before children. Nobody sets its fields anew.

    `parents[i]` is the index of node i's parent, or `ROOT` for the last committed token. A chain has parents
    -1, 0, 1, ... Siblings carry different tokens. An empty tree means plain decoding. Each job has one in each step, so
    nothing guards the fields: a frozen one takes three times as long to make.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """Depth of every node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, dict[int, int]]:
        """Map each parent (`ROOT` included) to its children as {token_id: node}."""
        children: dict[int, dict[int, int]] = {}
        for node, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            children.setdefault(parent, {})[token_id] = node
        return children

    @classmethod
    def chain(cls, token_ids: list[int]) -> DraftTree:
        """A tree that is one path."""
        return cls(list(token_ids), list(range(-1, len(token_ids) - 1)))
