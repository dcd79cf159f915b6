"""The interface of all forwards, and rows that attend to a sparse cache while drafting."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from swiftbatch.worker.forward.expert_counts import ExpertCounts
from swiftbatch.worker.forward.multi_step_decode import DecodedChain
from swiftbatch.worker.forward.tile_packing import SequenceRows, tails
from swiftbatch.worker.kernels.compute_threads import Team
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.row_tables import Rows
from swiftbatch.worker.kv.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.kv.sparse_cache import NewEntries, Scanned, SparseCache, SparseCacheFactory
from swiftbatch.worker.sampling.draft_tree import DraftTree

if TYPE_CHECKING:
    from swiftbatch.worker.kv.paged_arena import KVArena
    from swiftbatch.worker.sampling.batch_sampler import BatchSampler


@dataclass(frozen=True)
class SparseRows:
    """The newest token of a chain, row 0, and a tree below it, behind everything that a partial cache holds."""

    cache: SparseCache
    token_ids: list[int]  # [num_rows]
    positions: list[int]  # [num_rows] absolute ones, from the sequence's `first_angle` on
    first_entry: int  # cache entry of the first row; the others follow, and all entries before it are seen
    boundary: int  # that entry, rounded up to whole blocks
    tail_entries: np.ndarray  # [num_rows, BLOCK] cache entries of the root, the ancestors and the row itself
    tail_lengths: list[int]  # [num_rows] how many of them are real
    biases: np.ndarray | None  # [boundary] float32, added to the scores of entries; None where all would be 0
    scanned: Scanned | None  # what is seen beside them
    is_partial: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, end: int) -> SparseRows:
        """Rows `start` to `end`, for a forward that has no room for all."""
        return replace(
            self,
            token_ids=self.token_ids[start:end],
            positions=self.positions[start:end],
            first_entry=self.first_entry + start,
            tail_entries=self.tail_entries[start:end],
            tail_lengths=self.tail_lengths[start:end],
        )


def partial_rows(cache: SparseCache, token_id: int, position: int, tree: DraftTree) -> SparseRows:
    """Rows of a token at an absolute position and of the tree below it, whose depth is at most `BLOCK - 1`."""
    first_entry = cache.num_entries
    boundary = -(-first_entry // BLOCK) * BLOCK
    entries, lengths = tails([first_entry], [first_entry], [tree])
    positions = [cache.first_angle + position + length - 1 for length in lengths]
    biases = _biases(cache, boundary)
    token_ids, scanned = [token_id, *tree.token_ids], cache.scanned
    return SparseRows(cache, token_ids, positions, first_entry, boundary, entries, lengths, biases, scanned)


def row_ahead(cache: SparseCache, token_id: int, position: int) -> SparseRows:
    """The row of a token alone; in its tail, not seen yet, the entries of those that are to be drawn behind it."""
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


# The interface of a target's forwards, whether `transformers` or our own kernels run them.


MOST_READ = 256  # known tokens in one call: a matrix is read once for all of them


class DrawChains(Protocol):
    """`chains.draw_chains` of a target, whose drawing has made the samplers."""

    def __call__(
        self,
        groups: Many[Rows],
        samplers: Many[Any],
        num_rounds: int,
        ends: Many[frozenset[int]] | None = None,
    ) -> list[DecodedChain]: ...


class Forwards(Protocol):
    """Weights on one device, and row-exact forwards: a row's bits do not depend on what shares its forward."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    cache_shape: CacheShape
    never_sampled_ids: torch.Tensor | None
    """Tokens without a text, which are never drawn: the target makes their logits minus infinity."""

    rows_per_forward: int
    """Forwards have multiples of so many rows, padding included; 1: every row takes time of its own."""

    has_windows: bool
    """Some layers do not see all positions as they are, so that drafts that scan all keys would be of another model.

    So it is with soft caps of scores and with latent attention, too.
    """

    has_experts: bool
    """Rows meet experts of their own: no row is free, however many a forward has."""

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The counter of experts that the rows of `run` meet; None where nothing counts them."""

    @property
    def team(self) -> Team | None:
        """CPU threads of the compiled kernels that run all of it; None where something else does."""

    @property
    def draw_chains(self) -> DrawChains | None:
        """Draws several rounds of one row each in one call; None where each round is a forward and draws."""

    @property
    def arena(self) -> KVArena | None:
        """The buffer that all caches lie in; None where each has its own."""

    def new_batch_sampler(self) -> BatchSampler:
        """Make a drawing, which draws from the logits on the same device."""

    @property
    def numerics(self) -> str:
        """All that decides bits beside the weights, in a line."""

    def run(self, groups: list[SequenceRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states `[num_rows, hidden]` and logits `[num_rows, vocab] float32` of all groups' rows.

        Keys and values go to the rows' entries of their caches.
        """

    def read(self, cache: FullKVCache, token_ids: list[int]) -> torch.Tensor:
        """Keep keys and values of some first of these known tokens behind a cache; returns their final hidden states.

        How many are read at once, `[num_read, hidden]`, is what pays best; the caller goes on behind them.
        """

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows behind partial caches, as `run` does: the results are good guesses of `run`'s, in no way exact."""

    def room_for(self, new_cache: SparseCacheFactory, budget: int) -> NewEntries:
        """Return the room for the partial caches that a drafter makes with a budget of entries."""

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        """Queries of one token behind a cache, as they meet the keys: `[num_layers, num_kv_heads, group, head_dim]`.

        The entry behind the committed ones is overwritten. The queries may hold only until the next call.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens `[num_rows]` as input of the first layer, `[num_rows, hidden]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The language model head: `[..., num_rows, hidden]` to `[..., num_rows, vocab] float32`."""
