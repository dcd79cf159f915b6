"""Makes a chain into the tree of a full verification: its tokens, other candidates for the last one, trees below."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.two_level.chain import Chain, Round
from swiftbatch.worker.drawing.tree import ROOT, DraftTree


@dataclass(frozen=True)
class ChainTree:
    """A tree whose first `chain_length` nodes are the chain."""

    tree: DraftTree = field(default_factory=DraftTree)
    chain_length: int = 0
    rounds: list[Round] = field(default_factory=list)
    propose_seconds: float = 0.0  # of the tree below the chain


def assemble(chain: Chain, below: DraftTree, num_alternatives: int, seconds: float) -> ChainTree:
    """Join a chain, the tree below its newest token, and the same tree below other candidates for that token."""
    length, max_nodes = chain.num_tokens, chain.num_nodes
    tree = DraftTree.chain(chain.drawn)
    _graft(tree, below, length - 1, max_nodes)
    for token_id in _alternatives(chain, num_alternatives):
        if len(tree) < max_nodes:
            tree.token_ids.append(token_id)
            tree.parents.append(length - 2)
            _graft(tree, below, len(tree) - 1, max_nodes)
    return ChainTree(tree, length, chain.rounds, seconds)


def _graft(tree: DraftTree, below: DraftTree, parent: int, max_nodes: int) -> None:
    """Append a tree below a node, as far as there is room."""
    first = len(tree)
    room = max(0, max_nodes - first)
    tree.token_ids.extend(below.token_ids[:room])
    tree.parents.extend(parent if p == ROOT else first + p for p in below.parents[:room])


def _alternatives(chain: Chain, num_alternatives: int) -> list[int]:
    """Candidates that came next to the newest token, best first."""
    if num_alternatives <= 1 or chain.logits is None:
        return []
    ranker = CandidateRanker(chain.sequence)
    [ranked] = ranker.rank_logits(chain.logits[None], [0], num_alternatives)
    return [token_id for _, token_id in ranked if token_id != chain.newest][: num_alternatives - 1]
