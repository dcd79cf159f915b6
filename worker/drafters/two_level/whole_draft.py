"""What a draft becomes for the full verification: its chain, other candidates for its last token, and trees below."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.drafters.ranking import CandidateRanker
from worker.drafters.two_level.draft import Draft, Round
from worker.drafters.two_level.proposer import Proposal
from worker.tree import ROOT, DraftTree


@dataclass(frozen=True)
class WholeDraft:
    """A tree whose first `chain_length` nodes are the chain."""

    tree: DraftTree = field(default_factory=DraftTree)
    is_reused: list[bool] = field(default_factory=list)  # for each node: proposed by token reuse alone
    chain_length: int = 0
    rounds: list[Round] = field(default_factory=list)
    propose_seconds: float = 0.0  # of the tree below the chain


def assemble(draft: Draft, below: Proposal, num_alternatives: int, max_nodes: int, seconds: float) -> WholeDraft:
    """Chain, proposal below its newest token, and the same proposal below the other candidates for that token."""
    chain = draft.chain
    tree = DraftTree.chain(chain)
    is_reused = list(draft.is_reused)
    _graft(tree, is_reused, below, len(chain) - 1, max_nodes)
    for token_id in _alternatives(draft, num_alternatives):
        if len(tree) < max_nodes:
            tree.token_ids.append(token_id)
            tree.parents.append(len(chain) - 2)
            is_reused.append(False)
            _graft(tree, is_reused, below, len(tree) - 1, max_nodes)
    return WholeDraft(tree, is_reused, len(chain), draft.rounds, seconds)


def _graft(tree: DraftTree, is_reused: list[bool], below: Proposal, parent: int, max_nodes: int) -> None:
    """Append a proposal below a node, as far as there is room."""
    first = len(tree)
    room = max(0, max_nodes - first)
    tree.token_ids.extend(below.tree.token_ids[:room])
    tree.parents.extend(parent if p == ROOT else first + p for p in below.tree.parents[:room])
    is_reused.extend(below.is_reused[:room])


def _alternatives(draft: Draft, num_alternatives: int) -> list[int]:
    """Candidates that came next to the newest token, best first."""
    if num_alternatives <= 1 or draft.logits is None:
        return []
    ranker = CandidateRanker(draft.sequence)
    [ranked] = ranker.rank_logits(draft.logits[None], [0], num_alternatives)
    return [token_id for _, token_id in ranked if token_id != draft.newest][: num_alternatives - 1]
