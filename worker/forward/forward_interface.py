"""Interface of all forwards, and rows that attend to a sparse cache in drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch

from swiftbatch.worker.forward.expert_counts import ExpertCounts
from swiftbatch.worker.forward.tile_packing import SequenceRows, tails
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.native_library import Team
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import NewEntries, Scanned, SparseCache, SparseCacheFactory
from swiftbatch.worker.sampling.draft_tree import DraftTree

if TYPE_CHECKING:
    from swiftbatch.worker.kv.slot_arena import KVArena
    from swiftbatch.worker.sampling.batch_sampler import BatchSampler


@dataclass(frozen=True)
class SparseRows:
    """Latest token of a chain (row 0) and a tree below it, after a partial cache."""

    cache: SparseCache
    token_ids: list[int]  # [num_rows]
    positions: list[int]  # [num_rows] absolute positions plus the sequence's `first_angle`
    first_entry: int  # cache entry of the first row; the others follow, and all entries before it are seen
    boundary: int  # `first_entry`, rounded up to whole blocks
    tail_entries: np.ndarray  # [num_rows, BLOCK] cache entries of the root, the ancestors and the row itself
    tail_lengths: list[int]  # [num_rows] number of tail entries without padding
    biases: np.ndarray | None  # [boundary] float32, added to the scores of entries; None if all are 0
    scanned: Scanned | None  # keys that rows see in addition to the entries
    is_partial: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, end: int) -> SparseRows:
        """Return rows `start` to `end`."""
        return replace(
            self,
            token_ids=self.token_ids[start:end],
            positions=self.positions[start:end],
            first_entry=self.first_entry + start,
            tail_entries=self.tail_entries[start:end],
            tail_lengths=self.tail_lengths[start:end],
        )


def partial_rows(cache: SparseCache, token_id: int, position: int, tree: DraftTree) -> SparseRows:
    """Return rows of a token and of a tree below it, at most `BLOCK - 1` deep."""
    first_entry = cache.num_entries
    boundary = -(-first_entry // BLOCK) * BLOCK
    entries, lengths = tails([first_entry], [first_entry], [tree])
    positions = [cache.first_angle + position + length - 1 for length in lengths]
    biases = _biases(cache, boundary)
    token_ids, scanned = [token_id, *tree.token_ids], cache.scanned
    return SparseRows(cache, token_ids, positions, first_entry, boundary, entries, lengths, biases, scanned)


def row_ahead(cache: SparseCache, token_id: int, position: int) -> SparseRows:
    """Return a token's row, with the entries of later rows in its tail."""
    row = partial_rows(cache, token_id, position, DraftTree())
    return replace(row, tail_entries=row.first_entry + np.arange(BLOCK)[None])


def _biases(cache: SparseCache, boundary: int) -> np.ndarray | None:
    if cache.bias is None and cache.num_entries == boundary:
        return None
    biases = np.zeros(boundary, dtype=np.float32)
    if cache.bias is not None:
        biases[: len(cache.bias)] = cache.bias
    biases[cache.num_entries :] = -np.inf
    return biases


# Interface of a target's forwards.


MOST_READ = 256  # most known tokens per call, in which each matrix is read only once


@dataclass(frozen=True)
class DecodedChain:
    """Tokens of one sequence's chain."""

    token_ids: list[int]
    has_failed: bool  # true if no token can be drawn after these


DrawChains = Callable[..., list[DecodedChain]]
"""`native_forwards.draw_chains` without its decoder, and without the tokens that are never sampled."""


class Forwards(Protocol):
    """Weights on one device, and row-exact forwards: a row's bits do not depend on other rows."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    cache_shape: CacheShape
    never_sampled_ids: torch.Tensor | None
    """Ids of tokens without text, whose logits the target sets to -inf."""

    rows_per_forward: int
    """Forwards are padded to multiples of this; 1: each row takes its own time."""

    narrow_rows: tuple[int, ...]
    """Ascending numbers of rows of cheaper forwards, to which few rows are padded instead, with the same bits."""

    can_scan: bool
    """Drafts can scan keys: C kernels run, and rows see all positions as they are."""

    has_experts: bool
    """Rows use their own experts, so no row is free."""

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """Return the counter of experts that `run` uses, or None if experts are not counted."""

    @property
    def team(self) -> Team | None:
        """Return the kernels' CPU threads, or None if forwards do not run on them."""

    @property
    def draw_chains(self) -> DrawChains | None:
        """Return the function that draws several rounds of one row each, or None if it is not supported.

        With an `arena`, rows are of its caches.
        """

    @property
    def arena(self) -> KVArena | None:
        """Return the buffer of all caches, or None if each cache has its own."""

    def new_batch_sampler(self) -> BatchSampler:
        """Return a sampler of logits on this device."""

    @property
    def numerics(self) -> str:
        """Return one line with everything that determines bits, except the weights."""

    def run(
        self, groups: list[SequenceRows], feature_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return final hidden states `[num_rows, hidden]` and logits `[num_rows, vocab] float32` of all rows.

        It writes keys and values to the rows' cache entries. With `feature_layers`, the outputs of these layers stand
        in place of the final hidden states, side by side in the model's dtype.
        """

    def read(self, cache: FullKVCache, token_ids: list[int], feature_layers: tuple[int, ...] = ()) -> torch.Tensor:
        """Run the first `num_read` of these known tokens and commit them to a cache.

        Returns hidden states `[num_read, hidden]` as `run` does.
        """

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows after partial caches as `run` does; results only approximate those of `run`."""

    def room_for(self, new_cache: SparseCacheFactory, budget: int) -> NewEntries:
        """Return the allocator of a drafter's partial caches."""

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        """Return rotated queries of a token after a cache, `[num_layers, num_kv_heads, group, head_dim]`.

        It overwrites the next entry. The queries may be valid only until the next call.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens `[num_rows]`, `[num_rows, hidden]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the language model head: `[..., num_rows, hidden]` to `[..., num_rows, vocab] float32`."""
