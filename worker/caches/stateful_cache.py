"""The states that caches keep at boundaries, wherever they lie, and what such caches have in common."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from swiftbatch.jobs.checkpoints.state_file import LayerStates
from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.kernels.sizes import BLOCK

Kept = TypeVar("Kept")  # the states of all layers
MOST_WANTED = 4  # boundaries that are kept for others: a state may take 150 MB
NUM_RETURNS = 2  # of the boundaries that a sequence may go back to: one of them lies a whole distance back


class KeptStates(Generic[Kept]):
    """The states at boundaries that others copy from, and at the last of those that the sequence may go back to."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # by position, in the order in which they were passed
        self._wanted: list[int] = []  # the newest last
        self._distance: int | None = None

    def want(self, position: int) -> None:
        """Keep the states at a boundary, when it is passed; the last few that are asked for."""
        if position and position not in self._wanted:
            self._wanted.append(position)
        for dropped in self._wanted[:-MOST_WANTED]:
            self._wanted.remove(dropped)
            self._kept.pop(dropped, None)

    def want_every(self, distance: int) -> None:
        """Keep the states at the last two multiples of `distance`."""
        self._distance = max(1, distance)

    def wants(self, position: int) -> bool:
        """Tell whether states are to be kept there."""
        return position in self._wanted or self._is_return(position)

    def keep(self, position: int, states: Kept) -> None:
        """Keep states, never changed."""
        self._kept[position] = states
        returns = [each for each in self._kept if each not in self._wanted]
        for each in returns[:-NUM_RETURNS]:
            del self._kept[each]

    def at(self, position: int) -> Kept | None:
        """The states at a position; None where they are not kept."""
        return self._kept.get(position)

    def nearest(self, limit: int) -> tuple[int, Kept] | None:
        """The last position, `limit` at most, whose states are kept, and these; None without any."""
        position = max((each for each in self._kept if each <= limit), default=None)
        return None if position is None else (position, self._kept[position])

    def roll_back(self, length: int) -> None:
        """Forget states behind `length` positions: others will come there."""
        self._kept = {position: states for position, states in self._kept.items() if position <= length}

    def _is_return(self, position: int) -> bool:
        return self._distance is not None and position % self._distance == 0


class StatefulKVCache(FullKVCache):
    """A `FullKVCache` of a model that has layers with a state; `boundary` is that of the newest state."""

    is_by_position = False
    boundary: int
    _kept: KeptStates[Any]

    def prefix(self, length: int) -> FullKVCache:
        raise NotImplementedError("a state has no view at an earlier length")

    def states(self) -> LayerStates | None:
        return self.states_at(self.boundary) if self.boundary else None

    def expect_copies(self, end: int) -> None:
        self._kept.want(end // BLOCK * BLOCK)

    def expect_returns(self, distance: int) -> None:
        self._kept.want_every(-(-distance // BLOCK) * BLOCK)

    def _refuse_unfit(self, states: LayerStates, num_layers: int) -> None:
        """Raise ValueError for states that are not behind a boundary of this cache, or not of so many layers."""
        end = states.num_positions
        if end % BLOCK or end > self.length or len(states.arrays) != 2 * num_layers:
            raise ValueError(
                f"found {len(states.arrays)} states of layers behind {end} positions, expected {2 * num_layers} behind "
                f"a multiple of {BLOCK}, at most {self.length}"
            )
