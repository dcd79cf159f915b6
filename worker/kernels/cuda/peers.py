"""Buffers of the other GPUs that compute the same forward, and meetings with these GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.rank_shares import Rank


class Meeting:
    """Launch that ends once all GPUs have done what they launched before it.

    On a CPU, ranks run one after the other between their meetings, and it does nothing.
    """

    def __init__(self, flags: Tensor, distances: Tensor, rank: Rank) -> None:
        """Take `flags [num_ranks + 1] int32`, whose last one counts the own meetings."""
        self._flags, self._distances, self._rank = flags, distances, rank

    def __call__(self) -> None:
        if self._flags.device.type != "cuda":
            return
        from swiftbatch.worker.kernels.cuda.triton_primitives import launch_meeting  # a machine may lack Triton

        launch_meeting(self._flags, self._distances, self._rank)


@dataclass(frozen=True)
class Peers:
    """Places of the other GPUs' buffers, as distances from the own ones, counted in numbers."""

    rank: Rank
    meeting: Meeting
    distances: Mapping[int, Tensor]  # int64 [num_ranks], by the address of the own buffer

    def of(self, buffer: Tensor) -> Tensor:
        return self.distances[buffer.data_ptr()]


def distances(buffers: Sequence[Tensor], own: Tensor) -> Tensor:
    """Return by how many numbers each rank's buffer is away from the own one, int64 `[num_ranks]`."""
    places = [(each.data_ptr() - own.data_ptr()) // own.element_size() for each in buffers]
    return torch.tensor(places, dtype=torch.int64, device=own.device)


def meet_all(buffers: Sequence[Sequence[Tensor]]) -> list[Peers]:
    """Return each rank's view of all ranks' `buffers`, which every rank lists in the same order."""
    num_ranks = len(buffers)
    flags = [torch.zeros(num_ranks + 1, dtype=torch.int32, device=each[0].device) for each in buffers]
    found = []
    for number, own in enumerate(buffers):
        rank, known = Rank(number, num_ranks), dict[int, Tensor]()
        for buffer, same in zip(own, zip(*buffers, strict=True), strict=True):
            known[buffer.data_ptr()] = distances(same, buffer)
        meeting = Meeting(flags[number], distances(flags, flags[number]), rank)
        found.append(Peers(rank, meeting, known))
    return found


Launch = Callable[[], object]


def run_together(ranks: Sequence[Iterator[Launch]], devices: Sequence[torch.device]) -> None:
    """Run the launches of all ranks up to their next meeting, rank after rank, until all have ended."""
    places = [on(device) for device in devices]
    meetings = [_run_to_meeting(*each) for each in zip(ranks, places, strict=True)]
    while meetings[0] is not None:
        for meeting, place in zip(meetings, places, strict=True):
            assert meeting is not None, "all ranks come to all meetings"
            with place:
                meeting()
        meetings = [_run_to_meeting(*each) for each in zip(ranks, places, strict=True)]


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a reusable context in which a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _run_to_meeting(launches: Iterator[Launch], place: contextlib.AbstractContextManager[object]) -> Meeting | None:
    """Return the meeting that came, or None behind the last launch."""
    with place:
        for launch in launches:
            if isinstance(launch, Meeting):
                return launch
            launch()
    return None
