"""The interface of a target's forwards, whether `transformers` or our own kernels run them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swiftbatch.worker.caches.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial_cache import NewEntries, PartialCacheFactory
from swiftbatch.worker.kernels.compute_threads import Team
from swiftbatch.worker.kernels.row_tables import Rows
from swiftbatch.worker.target.chains import Drawn
from swiftbatch.worker.target.expert_counts import ExpertCounts
from swiftbatch.worker.target.partial_rows import PartialRows
from swiftbatch.worker.target.tiles import SequenceRows

if TYPE_CHECKING:
    from swiftbatch.worker.caches.slot_arena import KVArena
    from swiftbatch.worker.drawing.drawing import Drawing

MOST_READ = 256  # known tokens in one call: a matrix is read once for all of them


class DrawChains(Protocol):
    """`chains.draw_chains` of a target, whose drawing has made the samplers."""

    def __call__(
        self,
        groups: Many[Rows],
        samplers: Many[Any],
        num_rounds: int,
        ends: Many[frozenset[int]] | None = None,
    ) -> list[Drawn]: ...


class Forwards(Protocol):
    """Weights on one device, and row-exact forwards: a row's bits do not depend on what shares its forward."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    cache_shape: CacheShape
    undrawn_ids: torch.Tensor | None
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

    def new_drawing(self) -> Drawing:
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

    def check(self, groups: list[PartialRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows behind partial caches, as `run` does: the results are good guesses of `run`'s, in no way exact."""

    def room_for(self, new_cache: PartialCacheFactory, budget: int) -> NewEntries:
        """Return the room for the partial caches that a drafter makes with a budget of entries."""

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        """Queries of one token behind a cache, as they meet the keys: `[num_layers, num_kv_heads, group, head_dim]`.

        The entry behind the committed ones is overwritten. The queries may hold only until the next call.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens `[num_rows]` as input of the first layer, `[num_rows, hidden]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The language model head: `[..., num_rows, hidden]` to `[..., num_rows, vocab] float32`."""
