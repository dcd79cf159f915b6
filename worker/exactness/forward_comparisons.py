"""Measurements of a forward: rows of random trees against plain decoding, and logits against transformers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of
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


# Our forward's logits beside those of transformers on the same rows.


NUM_COMPARED_ROWS = 300
# relative to the logits' spread; a wrong mask shifts by about 1
MOST_SHIFTED = {torch.float32: 1e-3, torch.bfloat16: 0.25}
MOST_SHIFTED_BY_EXPERTS = 0.25  # if two experts weigh nearly the same, the last bit chooses
MEDIAN_SHIFTED = {torch.float32: 1e-2, torch.bfloat16: 0.25}  # for models with experts, where such rows are few


@dataclass(frozen=True)
class KeptRows:
    """Effect of 8-bit caches on our logits."""

    shift: float
    num_same_choices: int

    def summary(self, num_rows: int) -> str:
        return (
            f"its 8-bit keys and values shift logits by {self.shift:.2g} of their spread, {self.num_same_choices} of "
            f"{num_rows} rows have the same best token as without them"
        )


@dataclass(frozen=True)
class Agreement:
    """Distance between our logits and those of transformers."""

    num_rows: int
    greatest_difference: float
    shift: float  # root mean square of the differences, relative to the logits' spread
    num_same_choices: int  # rows with the same best token
    agrees: bool
    kept: KeptRows | None = None  # effect of 8-bit keys and values; None without 8-bit caches

    def summary(self) -> str:
        found = (
            f"the greatest difference between two logits is {self.greatest_difference:.2g}, {self.num_same_choices} of "
            f"{self.num_rows} rows have the same best token"
        )
        if self.agrees:
            kept = "" if self.kept is None else f"\n{self.kept.summary(self.num_rows)}"
            ties = (
                ""
                if self.num_same_choices == self.num_rows
                else (" (tokens here are random; in the other rows the best two nearly tie, and rounding decides)")
            )
            return f"the forward agrees with that of transformers: {found}{ties}{kept}"
        return f"THE FORWARD IS NOT THAT OF TRANSFORMERS: {found}; do not use this model here, and please report it"


@torch.inference_mode()
def compare(
    target: TargetModel, num_rows: int = NUM_COMPARED_ROWS, seed: int = 0, has_integer_rows: bool = False
) -> Agreement:
    """Run `num_rows` random tokens through the target's tiles and through transformers' eager forward.

    Rows of 8 bits may shift logits as much as bfloat16.
    """
    num_rows = min(num_rows, target.files.max_positions)
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(target.vocab_size, (num_rows,), generator=generator)
    ours = _our_logits(target, token_ids.tolist(), _plain_cache(target, num_rows))
    with _eager(target.model):
        theirs = target.model(input_ids=token_ids[None].to(target.device), use_cache=False).logits[0].float()
    shift, num_same_choices = _distance(ours, theirs)
    kept = None
    if target.cache_shape.kv_dtype is not None:
        in_codes = _our_logits(target, token_ids.tolist(), target.new_cache(num_rows + TILE_ROWS))
        kept = KeptRows(*_distance(in_codes, ours))
    median = float((ours - theirs).square().mean(-1).sqrt().median()) / _spread(theirs)
    return Agreement(
        num_rows=num_rows,
        greatest_difference=float((ours - theirs).abs().max()),
        shift=shift,
        num_same_choices=num_same_choices,
        agrees=_is_near(target, torch.bfloat16 if has_integer_rows else target.dtype, shift, median),
        kept=kept,
    )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Return the shift of logits relative to their spread, and the number of rows with the same best token."""
    shift = float((found - expected).square().mean().sqrt()) / _spread(expected)
    return shift, int((found.argmax(-1) == expected.argmax(-1)).sum())


def _spread(logits: torch.Tensor) -> float:
    return max(float(logits.std()), torch.finfo(torch.float32).tiny)  # one token has no spread


def _plain_cache(target: TargetModel, num_rows: int) -> FullKVCache:
    if target.cache_shape.kv_dtype is None or target.forwards.arena is not None:
        return target.new_cache(num_rows + TILE_ROWS)
    return new_cache_of(replace(target.cache_shape, kv_dtype=None), num_rows + TILE_ROWS)


def _is_near(target: TargetModel, rounding: torch.dtype, shift: float, median: float) -> bool:
    """Return whether the shifts of all rows and of single ones are within rounding."""
    if any("Experts" in type(module).__name__ for module in target.model.modules()):
        return shift <= MOST_SHIFTED_BY_EXPERTS and median <= MEDIAN_SHIFTED[rounding]
    return shift <= MOST_SHIFTED[rounding]


def _our_logits(target: TargetModel, token_ids: list[int], cache: FullKVCache) -> torch.Tensor:
    logits = []
    while cache.length < len(token_ids):
        logits.append(target.logits(target.read(cache, token_ids[cache.length :])))
    return torch.cat(logits)


@contextlib.contextmanager
def _eager(model: Any) -> Iterator[None]:
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    try:
        model.set_attn_implementation("eager")
        model.config._experts_implementation = "eager"
        yield
    finally:
        model.set_attn_implementation(attention)
        model.config._experts_implementation = experts
