"""The same work every time: prompts, then trees of all sequences at once; a digest of every bit that came of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import torch

from swiftbatch.worker.exactness.first_run.parts import ArenaTarget
from swiftbatch.worker.exactness.probe import random_tree
from swiftbatch.worker.target.tiles import max_tree_depth, tree_rows

NUM_STEPS = 3
MOST_NODES = 12  # of each tree
ROOM = (MOST_NODES + 1) * NUM_STEPS  # positions behind the prompts


def work_digest(target: ArenaTarget, lengths: Sequence[int]) -> str:
    """SHA-256 over final hidden states, logits, keys and values, of a sequence for each of `lengths`."""
    rng, digest = random.Random(0), hashlib.sha256()
    caches = []
    for length in lengths:
        caches.append(target.new_cache(length + ROOM))
        while (missing := length - caches[-1].length) > 0:
            token_ids = [rng.randrange(target.vocab_size) for _ in range(missing)]
            _add(digest, target.read(caches[-1], token_ids))
    for _ in range(NUM_STEPS):
        groups = []
        for cache in caches:
            tree = random_tree(rng, MOST_NODES, max_tree_depth(cache.length), target.vocab_size)
            groups.append(tree_rows(cache, rng.randrange(target.vocab_size), tree))
        for cache, outputs in zip(caches, target.verify(groups), strict=True):
            _add(digest, outputs.hidden)
            _add(digest, outputs.logits)
            cache.commit([])
    for cache in caches:
        digest.update(cache.kv(0, cache.length).tobytes())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, numbers: torch.Tensor) -> None:
    digest.update(numbers.contiguous().view(torch.uint8).cpu().numpy().tobytes())
