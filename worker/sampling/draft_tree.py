"""Draft tree, which a drafter proposes and the target verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = -1


@dataclass(slots=True)
class DraftTree:
    """Tree of candidate continuations, parents before children; an empty tree means plain decoding.

    `parents[i]` is the index of node i's parent, or `ROOT` for the last committed token. Siblings have different
    tokens. Freezing the class would triple its creation time.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, dict[int, int]]:
        """Return {token_id: node} of each parent, also of `ROOT`."""
        children: dict[int, dict[int, int]] = {}
        for node, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            children.setdefault(parent, {})[token_id] = node
        return children

    @classmethod
    def chain(cls, token_ids: list[int]) -> DraftTree:
        return cls(list(token_ids), list(range(-1, len(token_ids) - 1)))
