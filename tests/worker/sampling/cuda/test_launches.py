"""A draw is a fixed list of launches over fixed memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftbatch.worker.sampling.cuda import cuda_sampler, filter_kernels
from swiftbatch.worker.sampling.cuda.cuda_sampler import Draw
from swiftbatch.worker.sampling.cuda.sampling_rows import MAX_VOCAB
from tests.worker.sampling.cuda.draw_parts import FILTERS, Branch, any_branch, plain, sequence_of, step_of


class Recorder:
    def __init__(self, launches: list[tuple[object, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self._launches.append((grid, *map(address, args), *constants.items()))


def address(argument: object) -> object:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class Refusal(TorchDispatchMode):
    """Refuses all torch operations except zeroing existing memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.zero_.default:
            raise AssertionError(f"{func} within a draw")
        return func(*args, **kwargs)


@pytest.mark.parametrize(("is_filtered", "num_launches"), [(False, 3), (True, 21)])
def test_a_draw_allocates_nothing_and_launches_the_same_whatever_the_rows_are(
    is_filtered: bool, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers, launches = step_of([any_branch(random.Random(1), plain()), None]), []
    for name in ("penalise_blocks", "bounds_of_blocks", "best_of_rows"):
        monkeypatch.setattr(cuda_sampler, name, Recorder(launches))
    for name in ("temper_blocks", "sum_bytes", "sum_weights", "find_lowest", "settle_cuts"):
        monkeypatch.setattr(filter_kernels, name, Recorder(launches))
    drawing = Draw(buffers)
    with Refusal():
        drawing.launch(is_filtered)
        first = launches.copy()
        launches.clear()
    buffers.rows.copy_(step_of([None, any_branch(random.Random(2), plain(**FILTERS))]).rows)
    with Refusal():
        drawing.launch(is_filtered)
    assert launches == first
    assert len(first) == num_launches


def test_more_tokens_than_the_sums_have_room_for_are_refused() -> None:
    buffers = step_of([Branch(sequence_of([1], plain(), 12), [], torch.zeros(12)), None])
    with pytest.raises(ValueError, match=rf"found {MAX_VOCAB + 1} tokens, expected 1 to {MAX_VOCAB}"):
        Draw(dataclasses.replace(buffers, logits=torch.zeros(2, MAX_VOCAB + 1)))
