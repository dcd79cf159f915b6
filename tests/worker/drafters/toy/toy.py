"""The smallest engine with a trained part: a table of next tokens."""

from __future__ import annotations

from pathlib import Path

from swiftbatch.worker.drafters.catalogue import TrainedPart, read_part
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import DraftTree

PART = TrainedPart("toy", "toy", "toy.safetensors")
MOST_TOKENS = 3


def toy(target: TargetModel, costs: Costs, parts_folder: Path | None) -> Drafter:
    """Raises ModelError as `read_part` does."""
    followers = read_part(PART, target, parts_folder).checked({"followers": (target.vocab_size,)})["followers"]
    return ToyDrafter([int(token) for token in followers])


class ToyDrafter(Drafter):
    def __init__(self, followers: list[int]) -> None:
        self._followers = followers

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain(self._chain(request)) for request in requests]

    def _chain(self, request: DraftRequest) -> list[int]:
        chain, token = [], int(request.sequence.token_ids[-1])
        for _ in range(min(MOST_TOKENS, request.max_nodes, request.max_depth)):
            chain.append(token := self._followers[token])
        return chain
