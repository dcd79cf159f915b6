"""Layers of caches outside a GPU, on it two at a time: one is computed with while the next comes.

All heads of a position lie side by side, keys and then values, and positions behind one another: so whatever crosses is
one run of memory. A forward takes two copies for each layer and slot, a long one here and a short one home, and for
the first layers, which came while the last ones were computed, one more of the newest rows. Kernels see the strides of
a layer of an arena, and add up in the same order: the bits are those of caches on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftbatch.worker.caches.full_cache import CacheShape
from swiftbatch.worker.caches.host_copies import CopyComputation, CopyEvent, CopyLane
from swiftbatch.worker.kernels.kernel_sizes import RING_LAYERS

NO_LAYER = -1


@dataclass(frozen=True)
class Streams:
    """The stream that computes, and one copy lane for each direction: a GPU copies both ways at a time."""

    computation: CopyComputation
    coming: CopyLane
    going: CopyLane

    def wait_for_copies(self) -> None:
        """Return once all copies that were queued are done."""
        for lane in (self.coming, self.going):
            lane.mark().synchronize()


@dataclass(frozen=True)
class Visit:
    """The positions of one slot that a forward reads and writes."""

    slot: int
    rows: torch.Tensor  # [num_layers, capacity, num_parts, num_kv_heads, row_width], on the host
    num_final: int  # first positions that no forward changes any more, `end` at most
    end: int  # positions below it are read, but for those that are written
    written: tuple[slice, ...] = ()


@dataclass
class _Held:
    """A slot's positions below `end` on a side, once the side's newest arrival is there; they stay as they are."""

    layer: int = NO_LAYER
    end: int = 0


@dataclass
class _Side:
    """Room for one layer of all slots."""

    rows: torch.Tensor  # [num_slots, capacity, num_parts, num_kv_heads, row_width]
    held: list[_Held]
    arrival: CopyEvent | None = None


class LayerRing:
    """Layer n has side `n % RING_LAYERS`. A forward calls `begin`, and for each layer `wait`, computes, `leave`.

    Positions of a slot that change in any other way are to be forgotten.
    """

    def __init__(self, shape: CacheShape, num_slots: int, capacity: int, streams: Streams) -> None:
        self._num_layers, self._streams = shape.num_layers, streams
        num_sides = min(RING_LAYERS, shape.num_layers)
        size = (num_sides, num_slots, capacity, shape.num_parts, shape.num_kv_heads, shape.row_width)
        rows = torch.empty(size, dtype=shape.row_dtype, device=shape.device)
        self.buffer = rows.permute(
            0, 3, 1, 4, 2, 5
        )  # [num_sides, num_parts, num_slots, num_kv_heads, capacity, row_width]
        self._sides = [_Side(side, [_Held() for _ in range(num_slots)]) for side in rows]
        self._visits: Sequence[Visit] = ()
        self._went: CopyEvent | None = None  # all that was written until now is on the host

    def begin(self, visits: Sequence[Visit]) -> None:
        """Prepare for rows of these slots, each slot once: let what is missing of the first layers come."""
        self._visits = visits
        self._streams.coming.follow(self._streams.computation.record_event())  # which may still read what lies here
        for layer in range(len(self._sides)):
            self._bring(layer, visits)

    def wait(self, layer: int) -> None:
        """Let all that is computed from now on find the layer."""
        self._streams.computation.wait_event(self._side(layer).arrival)

    def leave(self, layer: int) -> None:
        """Send a computed layer's new rows home, and let the next one for its side come, at the end a first one."""
        self.keep(layer, self._visits)
        following = layer + len(self._sides)
        if following < self._num_layers:
            self._bring(following, self._visits)
        elif len(self._sides) < self._num_layers:
            self._bring(layer % len(self._sides), self._visits)

    def keep(self, layer: int, visits: Sequence[Visit]) -> None:
        """Send the rows that were written home."""
        side, going = self._side(layer), self._streams.going
        going.follow(self._streams.computation.record_event())
        for visit in visits:
            for rows in visit.written:
                going.copy(visit.rows[layer, rows], side.rows[visit.slot, rows])
        self._went = going.mark()

    def show(self, layer: int, visit: Visit) -> torch.Tensor:
        """A slot's layer outside a forward, `[num_parts, num_kv_heads, capacity, row_width]`.

        It holds until another takes its place.
        """
        self._streams.coming.follow(self._streams.computation.record_event())
        self._bring(layer, [visit])
        self.wait(layer)
        return self.buffer[layer % len(self._sides), :, visit.slot]

    def forget(self, slot: int, length: int) -> None:
        """Forget a slot's positions from `length` on, which are going to change, or have."""
        for side in self._sides:
            side.held[slot].end = min(side.held[slot].end, length)

    def settle(self) -> None:
        """Return once all rows that forwards wrote are on the host; any thread may ask."""
        if self._went is not None:
            self._went.synchronize()

    def _side(self, layer: int) -> _Side:
        return self._sides[layer % len(self._sides)]

    def _bring(self, layer: int, visits: Sequence[Visit]) -> None:
        """Let come what is missing of a layer."""
        side, coming = self._side(layer), self._streams.coming
        if self._went is not None:
            coming.follow(self._went)  # the side is free then, and on the host is what comes
        for visit in visits:
            held = side.held[visit.slot]
            missing = slice(min(held.end, visit.num_final) if held.layer == layer else 0, visit.end)
            if missing.start < missing.stop:
                coming.copy(side.rows[visit.slot, missing], visit.rows[layer, missing])
            held.layer, held.end = layer, visit.num_final
        side.arrival = coming.mark()
