"""A missing wait reads old data on these streams."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LazyEvent:
    def __init__(self, stream: LazyStream, num_queued: int) -> None:
        self._stream, self._num_queued = stream, num_queued

    def synchronize(self) -> None:
        self._stream.run(self._num_queued)


def _nothing() -> None:
    pass


class LazyStream:
    """Works only when a later event is awaited."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], object]] = []
        self._num_done = 0
        self.most_copied = 0  # bytes in one copy

    @property
    def num_waiting(self) -> int:
        return len(self._queued) - self._num_done

    def submit(self, work: Callable[[], object]) -> None:
        self._queued.append(work)

    def run(self, end: int) -> None:
        while self._num_done < end:
            self._num_done += 1
            work, self._queued[self._num_done - 1] = self._queued[self._num_done - 1], _nothing
            work()

    def record_event(self) -> LazyEvent:
        return LazyEvent(self, len(self._queued))

    def wait_event(self, event: LazyEvent) -> None:
        self.submit(event.synchronize)

    mark, follow = record_event, wait_event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.most_copied = max(self.most_copied, source.numel() * source.element_size())
        self.submit(lambda: target.copy_(source))

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((num_bytes,), 1, dtype=torch.uint8), torch.full((num_bytes,), 2, dtype=torch.uint8)
