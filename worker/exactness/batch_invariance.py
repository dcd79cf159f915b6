"""Measurement of row-exactness: rows of random draft trees against plain decoding, bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree

NUM_SEQUENCES = 3  # contexts per forward with the fewest rows
CONTEXT_GROWTH = 40  # most tokens by which a context grows between two trees
CONTEXT_LIMIT = 1500  # tokens after which a context starts again
MOST_NODES = 23
NUM_CACHES = 2 * NUM_SEQUENCES
MAX_LENGTH = CONTEXT_LIMIT + 2 * TILE_ROWS


def num_caches(num_rows: int) -> int:
    """Return the number of caches for a probe with `num_rows` per forward: two per context."""
    return NUM_CACHES * max(1, num_rows // NUM_ROWS)


@dataclass(frozen=True)
class ProbeResult:
    """Compared rows, and those with any differing bit in logits, keys or values."""

    num_rows: int
    num_differing: int


def random_tree(rng: random.Random, num_nodes: int, max_depth: int, vocab_size: int) -> DraftTree:
    """Return a random tree with distinct siblings; empty if `max_depth` is 0."""
    token_ids: list[int] = []
    parents: list[int] = []
    depths = {ROOT: 0}
    taken: set[tuple[int, int]] = set()
    for _ in range(num_nodes):
        parent = rng.choice([node for node, depth in depths.items() if depth < max_depth] or [None])
        token_id = rng.randrange(vocab_size)
        if parent is None or (parent, token_id) in taken:
            continue
        taken.add((parent, token_id))
        depths[len(token_ids)] = depths[parent] + 1
        token_ids.append(token_id)
        parents.append(parent)
    return DraftTree(token_ids, parents)


class _Context:
    """Growing random text in two caches, one for trees and one for plain decoding."""

    def __init__(self, target: TargetModel, rng: random.Random) -> None:
        self._target, self._rng = target, rng
        self.tree_cache, self.plain_cache = (target.new_cache(MAX_LENGTH) for _ in range(2))
        self.root_id = 0

    def grow(self) -> None:
        """Read random tokens into both caches as a prompt."""
        if self.plain_cache.length > CONTEXT_LIMIT - CONTEXT_GROWTH:
            self.tree_cache.roll_back(0)
            self.plain_cache.roll_back(0)
        [self.root_id] = self._random_ids(1)
        self.read(self._rng.randrange(1, CONTEXT_GROWTH - 1))

    def read(self, num_tokens: int) -> None:
        new_ids = self._random_ids(num_tokens)
        for cache in (self.tree_cache, self.plain_cache):
            end = cache.length + len(new_ids)
            while cache.length < end:
                self._target.read(cache, new_ids[cache.length - end :])

    def tree(self, most_nodes: int) -> DraftTree:
        num_nodes = self._rng.randrange(1, most_nodes + 1)
        return random_tree(self._rng, num_nodes, max_tree_depth(self.tree_cache.length), self._target.vocab_size)

    def _random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._target.vocab_size) for _ in range(count)]


def probe_rows(
    target: TargetModel, num_rows: int, seed: int = 0, first_length: int = 0, most_nodes: int = MOST_NODES
) -> ProbeResult:
    """Verify random trees of several sequences and compare `num_rows` rows with plain decoding."""
    rng = random.Random(seed)
    num_sequences = num_caches(target.forwards.rows_per_forward) // 2
    contexts = [_Context(target, rng) for _ in range(num_sequences)]
    for context in contexts:
        context.read(first_length)
    compared = differing = 0
    while compared < num_rows:
        for context in contexts:
            context.grow()
        trees = [context.tree(most_nodes) for context in contexts]
        groups = [tree_rows(c.tree_cache, c.root_id, tree) for c, tree in zip(contexts, trees, strict=True)]
        verified = [outputs.logits.clone() for outputs in target.verify(groups)]  # plain decoding may overwrite them
        for context, tree, logits in zip(contexts, trees, verified, strict=True):
            differing += _num_differing(target, context, tree, logits)
            compared += len(tree) + 1
    return ProbeResult(compared, differing)


def _num_differing(target: TargetModel, context: _Context, tree: DraftTree, logits: torch.Tensor) -> int:
    root = context.plain_cache.length
    children = tree.children()
    differing = 0
    stack = [(ROOT, root)]  # nodes to visit, each with the cache length before it
    while stack:
        node, length = stack.pop()
        context.plain_cache.roll_back(length)
        token_id = context.root_id if node == ROOT else tree.token_ids[node]
        [plain] = target.verify([tree_rows(context.plain_cache, token_id, DraftTree())])
        entries = (root + 1 + node, length)
        same_cache = _same_keys_and_values(target, context.tree_cache, context.plain_cache, entries)
        differing += not (torch.equal(plain.logits[0], logits[node + 1]) and same_cache)
        context.plain_cache.commit([])
        stack += [(child, length + 1) for child in children.get(node, {}).values()]
    context.plain_cache.roll_back(root)
    return differing


def _same_keys_and_values(
    target: TargetModel, tree_cache: FullKVCache, plain_cache: FullKVCache, entries: tuple[int, int]
) -> bool:
    return all(
        torch.equal(ours, theirs)
        for layer in range(target.cache_shape.num_layers)
        for ours, theirs in zip(
            *(
                cache.stored_between(layer, slice(entry, entry + 1))
                for cache, entry in zip((tree_cache, plain_cache), entries, strict=True)
            ),
            strict=True,
        )
    )
