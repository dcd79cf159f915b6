"""The baseline: no drafts, one token a step."""

from __future__ import annotations

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.sampling.draft_tree import DraftTree


class AutoregressiveDrafter(Drafter):
    """Proposes nothing, so that every step is plain decoding."""

    drafts = False

    def __init__(self, *_: object) -> None:
        """Ignore the arguments of a `DrafterFactory`."""

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree()] * len(requests)

    def pass_plain(self, most: int) -> int:
        return most
