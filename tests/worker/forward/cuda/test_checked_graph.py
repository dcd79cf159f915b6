"""The double refuses what a capture refuses, and what replays would not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.worker.forward.cuda.checked_graph import CaptureError, CheckedGraph

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda buffer: buffer + 1, "allocates"),
        (lambda buffer: buffer.clone(), "allocates"),
        (lambda buffer: buffer[0].item(), "on the host"),
        (lambda buffer: bool(buffer.max() > 1), "allocates|on the host"),
    ],
    ids=["sum", "clone", "item", "condition"],
)
def test_memory_and_numbers_of_the_host_are_refused(work: Callable[[torch.Tensor], object], message: str) -> None:
    buffer = torch.zeros(4)
    with pytest.raises(CaptureError, match=message):
        CheckedGraph(lambda: work(buffer), CPU)


def test_work_in_place_is_replayed() -> None:
    buffer, ones = torch.zeros(2, 4), torch.ones(4)
    graph = CheckedGraph(lambda: torch.add(buffer[0], ones, out=buffer[1]), CPU)
    buffer[0] = 5
    graph.replay()
    assert buffer[1].tolist() == [6] * 4
    assert len(graph.launches) == 1


def test_a_buffer_that_moved_is_found() -> None:
    buffers = [torch.zeros(4)]
    graph = CheckedGraph(lambda: buffers[0].add_(1), CPU)
    buffers[0] = torch.zeros(4)
    with pytest.raises(CaptureError, match="where the graph has"):
        graph.replay()


def test_a_number_that_changed_is_found() -> None:
    buffer, numbers = torch.zeros(4), [1]
    graph = CheckedGraph(lambda: buffer.add_(numbers[0]), CPU)
    numbers[0] = 2
    with pytest.raises(CaptureError, match="where the graph has"):
        graph.replay()
