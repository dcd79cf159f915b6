"""Positions are copied in pieces beside the computation."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from swiftbatch.worker.kv.host_copies import CudaLane, Staging
from tests.worker.kv.lazy_stream import LazyStream

SIZE = (3, 2, 2, 50, 8)  # a slot's rows
PIECE = 7 * 3 * 2 * 2 * 8 * 2  # bytes of seven positions: fifty make eight pieces, the last one shorter


def random_rows(seed: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, SIZE, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def computation() -> LazyStream:
    return LazyStream()


@pytest.fixture
def lane() -> LazyStream:
    return LazyStream()


@pytest.fixture
def staging(lane: LazyStream, computation: LazyStream) -> Staging:
    return Staging(lane, computation, PIECE)


@pytest.mark.parametrize("num_positions", [1, 6, 7, 8, 14, 15, 50])
def test_what_is_read_is_there_in_every_piece(staging: Staging, num_positions: int) -> None:
    rows = random_rows(0)[..., :num_positions, :]
    for _ in range(2):  # the buffers hold the last call's pieces
        assert (staging.read(rows) == rows.numpy()).all()


@pytest.mark.parametrize("num_positions", [1, 6, 7, 8, 14, 15, 50])
def test_what_is_written_is_what_is_computed_with(
    staging: Staging, computation: LazyStream, num_positions: int
) -> None:
    rows, seen = torch.zeros(SIZE, dtype=torch.int16)[..., :num_positions, :], []
    kv = random_rows(1).numpy()[..., :num_positions, :]
    staging.write(rows, kv)
    computation.submit(lambda: seen.append(rows.clone()))
    computation.record_event().synchronize()
    assert (seen[0].numpy() == kv).all()


def test_a_read_sees_what_was_queued_before_it(staging: Staging, computation: LazyStream) -> None:
    rows, newer = random_rows(0), random_rows(1)
    computation.submit(lambda: rows.copy_(newer))
    assert (staging.read(rows) == newer.numpy()).all()


def test_what_was_queued_before_a_write_is_computed_with_what_was_there(
    staging: Staging, computation: LazyStream
) -> None:
    rows, seen = random_rows(0), []
    before = rows.clone()
    computation.submit(lambda: seen.append(rows.clone()))
    staging.write(rows, random_rows(1).numpy())
    computation.record_event().synchronize()
    assert seen[0].equal(before)


def test_a_write_and_a_read_behind_it_share_the_buffers(staging: Staging) -> None:
    first, second = random_rows(0), random_rows(1)
    kv = random_rows(2).numpy()
    staging.write(first, kv)
    assert (staging.read(second) == second.numpy()).all()
    assert (staging.read(first) == kv).all()


def test_no_copy_is_larger_than_a_buffer(staging: Staging, lane: LazyStream) -> None:
    staging.read(random_rows(0))
    assert lane.most_copied == PIECE


def test_a_piece_is_under_way_while_the_one_before_is_taken(staging: Staging, lane: LazyStream) -> None:
    """Two pieces are queued before the first wait."""
    steps: list[str] = []
    copy, run = lane.copy, lane.run
    lane.copy = lambda *tensors: (steps.append("copy"), copy(*tensors))  # type: ignore[method-assign,assignment,func-returns-value]
    lane.run = lambda end: (steps.append("wait"), run(end))  # type: ignore[method-assign,assignment,func-returns-value]
    staging.read(random_rows(0)[..., :21, :])
    assert steps == [*["copy"] * 4, "wait", *["copy"] * 2, "wait", "wait"]


def test_two_threads_do_not_mix_their_pieces(staging: Staging) -> None:
    rows = [random_rows(seed) for seed in range(2)]
    found: list[list[np.ndarray]] = [[], []]

    def read_often(number: int) -> None:
        found[number] = [staging.read(rows[number]) for _ in range(50)]

    threads = [threading.Thread(target=read_often, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((each == rows[number].numpy()).all() for number in range(2) for each in found[number])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_on_a_gpu_the_same_bits_go_out_and_come_back(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    staging = Staging(CudaLane(device), torch.cuda.current_stream(device), 1 << 20)
    arena = torch.zeros(4, 2, 3, 2, 5000, 64, dtype=dtype, device=device)
    kv = torch.randint(-1000, 1000, (4, 2, 2, 5000, 64), generator=torch.Generator().manual_seed(0)).to(dtype).numpy()
    staging.write(arena[:, :, 1], kv)
    assert (staging.read(arena[:, :, 1]) == kv).all()
    assert not arena[:, :, [0, 2]].any()
