"""The law of GRIFFIN's tokens: noise-ranked trees pass the gate, the published bonus fails it."""

from __future__ import annotations

import math

import pytest
import torch

from swiftbatch.worker.drafters.griffin.draft_input import TorchRoom
from swiftbatch.worker.drafters.griffin.griffin import EVERYTHING_PAYS, GrowingTree
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.law_parts import PLAIN, PROMPT, TABLE, VOCAB, gate, ours

pytestmark = pytest.mark.long

# The draft model's wrong guess of the target's logits.
GUESS = TABLE + torch.tensor([[math.cos(2.0 * row - 0.7 * column) for column in range(VOCAB)] for row in range(VOCAB)])
NO_CACHE = FullKVCache(CacheShape(1, 1, 1, torch.float32, torch.device("cpu")), 0)
PARAMS = PLAIN.model_copy(update={"temperature": 0.6, "top_p": 0.9})


def dynamic_tree(sequence: Sequence) -> DraftTree:
    room = TorchRoom.of(sequence, NO_CACHE, torch.zeros(1))
    tree = GrowingTree(sequence, 2, 2, EVERYTHING_PAYS)
    tree.add_root(room.rank(GUESS[[int(sequence.token_ids[-1])]], [[]], 2)[0])
    while (level := tree.next_level()) is not None:
        tokens = level.tree.token_ids[level.first :]
        tree.add_level(room.rank(GUESS[tokens], [[0]] * len(tokens), 2))
    return tree.best(4)[0]


def griffin_step(sequence: Sequence, tree: DraftTree) -> list[int]:
    return ours(sequence, dynamic_tree(sequence))


def published_bonus(sequence: Sequence, tree: DraftTree) -> list[int]:
    """Return the accepted path and a token from the bare logits, without temperature and top-p."""
    committed = griffin_step(sequence, tree)
    last = ([*PROMPT, *committed])[-2]
    noise = sequence.noise.row(len(sequence) + len(committed) - 1)
    return [*committed[:-1], int(torch.argmax(TABLE[last] + noise))]


def test_dynamic_trees_with_noise_in_their_scores_do_not_bias_a_token() -> None:
    assert gate(griffin_step, PARAMS) > 1e-4


def test_the_gate_catches_the_published_bonus_token() -> None:
    assert gate(published_bonus, PARAMS) < 1e-6
