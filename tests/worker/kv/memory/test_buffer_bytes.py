"""A GPU's memory plan counts what a forward and its draws allocate, and little more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_graph import Repeated, Work
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES
from swiftbatch.worker.kv.gpu_memory_plan import (
    ROWS,
    SUMS,
    GPUMemory,
    one_slot,
    sampling_bytes,
    slot_capacity,
)
from swiftbatch.worker.kv.model_sizes import ModelSizes
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from tests.worker.kernels.kernel_parts import Shape, random_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of modules that only looking at them imports
CPU = torch.device("cpu")
LONGEST = 8000


def tensor_bytes() -> dict[int, int]:
    """Return the bytes of all live tensors' memory by address."""
    gc.collect()
    memory = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return {each.data_ptr(): each.nbytes() for each in memory}


@contextmanager
def allocating(found: list[int]) -> Iterator[Callable[..., None]]:
    """Append the bytes that are allocated within, and still held at its end."""
    kept, before = list[object](), tensor_bytes()
    yield kept.append
    found.append(sum(size for address, size in tensor_bytes().items() if address not in before))


def captured(work: Work, device: torch.device) -> Repeated:
    return Repeated(work)


@pytest.mark.parametrize("num_rows", ROW_CHOICES)
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_draws_allocate_what_the_plan_counts(vocab: int, num_rows: int) -> None:
    logits, found = torch.zeros(num_rows, vocab), list[int]()
    with allocating(found) as keep:
        keep(CudaBatchSampler(logits, captured))
    assert 0.95 <= found[0] / sampling_bytes(vocab, num_rows) <= 1.0


@pytest.mark.parametrize("num_rows", ROW_CHOICES)
def test_a_forward_allocates_what_the_plan_counts(num_rows: int) -> None:
    shape = Shape(head_dim=128, num_kv_heads=2, group=4, hidden=512, intermediate=1536, vocab=4096)
    weights, capacity = stacked_weights(random_weights(shape), CPU), slot_capacity(LONGEST)
    arena, found = torch.zeros(2, 2, 1, 2, capacity, 128, dtype=torch.bfloat16), list[int]()
    with allocating(found) as keep:
        keep(CudaDecoder(weights, DeviceCaches(arena, capacity), CudaKernels(linear="triton", num_rows=num_rows)))
    needs = one_slot(ModelSizes(0, 0, 8, 2, 128, 512, 1536, 4096, 2), GPUMemory(0, num_rows=num_rows), LONGEST).needs
    planned = needs[SUMS].once + needs[ROWS].once - sampling_bytes(4096, num_rows)
    unrounded = capacity * 128 * 2  # angles in float32, of which these are half
    assert 0.98 <= found[0] / (planned - unrounded) <= 1.01  # the row table is not counted
