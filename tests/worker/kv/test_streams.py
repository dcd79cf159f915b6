"""A copy comes after the computation, on any stream and thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from swiftbatch.worker.kv.host_copies import ComputingStream, HostStream, Staging
from tests.worker.kv.lazy_stream import LazyStream

SIZE = (2, 2, 10, 8)


class Streams:
    def __init__(self) -> None:
        self._current = threading.local()

    def use(self) -> LazyStream:
        self._current.stream = LazyStream()
        return self.current()

    def current(self) -> LazyStream:
        if not hasattr(self._current, "stream"):
            self.use()
        stream: LazyStream = self._current.stream
        return stream


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def computing(streams: Streams) -> ComputingStream:
    return ComputingStream(streams.current)


@pytest.fixture
def staging(computing: ComputingStream) -> Staging:
    return Staging(LazyStream(), computing, 1 << 10)


def random_rows(seed: int) -> torch.Tensor:
    return torch.randint(-9, 9, SIZE, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


def test_another_thread_reads_what_was_computed_on_a_stream_made_after_loading(
    streams: Streams, computing: ComputingStream, staging: Staging
) -> None:
    rows, newer, found = random_rows(0), random_rows(1), list[np.ndarray]()
    stream = streams.use()
    computing.join()
    stream.submit(lambda: rows.copy_(newer))
    thread = threading.Thread(target=lambda: found.append(staging.read(rows)))
    thread.start()
    thread.join()
    assert (found[0] == newer.numpy()).all()


def test_what_was_written_is_there_for_a_stream_that_computes_later(
    streams: Streams, computing: ComputingStream, staging: Staging
) -> None:
    rows, kv, seen = random_rows(0), random_rows(1).numpy(), list[torch.Tensor]()
    staging.write(rows, kv)
    stream = streams.use()
    computing.join()
    stream.submit(lambda: seen.append(rows.clone()))
    stream.record_event().synchronize()
    assert (seen[0].numpy() == kv).all()


def test_a_stream_that_goes_on_waits_for_nothing(streams: Streams, computing: ComputingStream) -> None:
    computing.join()
    assert streams.current().num_waiting == 0
    streams.use()
    computing.join()
    assert streams.current().num_waiting == 1


def test_on_the_host_all_is_done_that_was_asked_for() -> None:
    stream, done = LazyStream(), list[int]()
    stream.submit(lambda: done.append(1))
    HostStream().wait_event(stream.record_event())
    HostStream().record_event().synchronize()
    assert done == [1]
