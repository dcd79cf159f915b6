"""Bits that `doctor` does not check.

On a GPU in published shapes, as in `python -m bench gpu --everything`; otherwise small, in the interpreter.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton

import tests.worker.interpreter  # noqa: F401
from bench.gpu.jobs import random_ids
from bench.gpu.trial import DEVIATION, SMALL_SIZES, Trial
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.exactness.forward_comparisons import MAX_LENGTH, NUM_CACHES, probe_rows
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import ROOM, work_digest
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import random_matrix
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedExperts
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES
from swiftbatch.worker.kernels.kv_codes import CODES
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.kernels.quantized_weights import Code, Weight, linear_from
from swiftbatch.worker.kv.gpu_memory_plan import most_of_a_job
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.sampling.draft_tree import DraftTree

IS_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not (IS_GPU or triton.knobs.runtime.interpret), reason="no CUDA device, and no interpreter"),
]


class Sizes(NamedTuple):
    lengths: Sequence[int] = (70, 1500, 5000)
    num_experts: int = 64
    expert_width: int = 768


SIZES = Sizes() if IS_GPU else Sizes((70,), 4, 128)
SMALL_PAGE = 64  # positions
FORMS: dict[str, tuple[Code, int, bool]] = {  # code, group, offsets
    "MXFP4": ("e2m1", 32, False),
    "NVFP4": ("e2m1", 16, False),
    "FP8": ("e4m3", 128, False),
    "int4": ("uint4", 128, True),
}
SMALLER = 2.0**-8  # scales, so that all sums are finite


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    scratch = tmp_path_factory.mktemp("bits")
    return Trial(torch.device("cuda"), scratch) if IS_GPU else Trial(torch.device("cpu"), scratch, SMALL_SIZES)


@pytest.fixture(autouse=True)
def _numbers_as_a_gpu_has_them() -> None:
    np.seterr(all="ignore")


def target_over(parts: Parts, arena: KVArena) -> ArenaTarget:
    """Make the model over an empty arena."""
    arena.buffer.zero_()
    forwards = CudaForwards(parts.weights, arena, frozenset(), parts.kernels, parts.capture)
    return ArenaTarget(forwards, parts.files)


def paged(parts: Parts, num_slots: int, longest: int, pool: PoolSize) -> KVArena:
    arena = KVArena(parts.cache_shape(), num_slots, longest, pool)
    random.Random(arena.num_pages).shuffle(arena.pool._free)
    return arena


def probe(target: TargetModel, parts: Parts) -> None:
    found = probe_rows(target, parts.extent.num_rows // 4 or 1, most_nodes=parts.extent.most_nodes)
    assert found.num_differing == 0, found


def test_slots_and_pages_in_any_order_give_one_digest_of_all_bits(trial: Trial) -> None:
    parts, lengths = trial.parts(), SIZES.lengths
    longest, shape = max(lengths) + ROOM, parts.cache_shape()
    num_pages, num_slots = 2 * len(lengths) * most_of_a_job(longest), len(lengths)
    small = PoolSize(num_pages * GPU_PAGE // SMALL_PAGE, SMALL_PAGE)
    arenas: list[Callable[[], KVArena]] = [
        lambda: KVArena(shape, num_slots, longest),
        lambda: KVArena(shape, num_slots, longest, PoolSize(num_pages)),
        lambda: paged(parts, num_slots, longest, PoolSize(num_pages)),
        lambda: paged(parts, num_slots, longest, small),
    ]
    assert len({work_digest(target_over(parts, make()), lengths) for make in arenas}) == 1


def test_logits_behind_pages_that_two_jobs_share_are_the_same(trial: Trial) -> None:
    """The second cache begins with the first one's pages, beside an older graph."""
    parts, length = trial.parts(), max(SIZES.lengths)
    target = target_over(parts, paged(parts, 2, length + ROOM, PoolSize(4 * most_of_a_job(length))))
    first, second = (target.new_cache(length + ROOM) for _ in range(2))
    token_ids = random_ids(target.vocab_size, length, 7)
    while first.length < length:
        target.read(first, token_ids[first.length :])
    second.copy_from(first, length)
    ours, theirs = target.verify([tree_rows(cache, 5, DraftTree()) for cache in (first, second)])
    assert ours.logits.equal(theirs.logits)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_trees_over_keys_and_values_in_8_bits_have_the_bits_of_plain_decoding(trial: Trial, kv_dtype: KVDtype) -> None:
    parts = trial.parts()
    shape = dataclasses.replace(parts.cache_shape(), kv_dtype=kv_dtype, kv_scale_bytes=CUDA_SCALE_BYTES)
    pool = PoolSize(NUM_CACHES * most_of_a_job(MAX_LENGTH))
    probe(target_over(parts, KVArena(shape, NUM_CACHES, MAX_LENGTH, pool)), parts)


def parts_with_experts(trial: Trial, parts: Parts, gate_up: Weight, down: Weight) -> Parts:
    """Replace every layer's feed-forward part by the same experts."""
    number, weights = SIZES.num_experts, trial.parts(parts.kernels, dtype="bfloat16").weights
    router = torch.randn(number, weights.sizes.hidden, generator=parts.generator(9), device=parts.device)
    routing = Routing(number, min(4, number // 2), Score.SOFTMAX)
    made = StackedExperts(routing, router, linear_from(gate_up), linear_from(down))
    layers = [replace(layer, gate_up=None, down=None, experts=made) for layer in weights.layers]
    parts.__dict__["loaded"] = replace(weights, layers=layers)
    return parts


def expert_shapes(trial: Trial) -> list[tuple[int, int]]:
    """Return the shapes of all experts' gates and ups, and downs."""
    number, width, hidden = SIZES.num_experts, SIZES.expert_width, trial.sizes.model.config["hidden_size"]
    return [(number * 2 * width, hidden), (number * hidden, width)]


def test_trees_of_a_model_with_experts_have_the_bits_of_plain_decoding(trial: Trial) -> None:
    parts = trial.parts(CudaKernels(linear="triton"), dtype="bfloat16")
    gate_up, down = (
        torch.empty(shape, dtype=parts.dtype, device=parts.device).normal_(0.0, DEVIATION, generator=parts.generator(8))
        for shape in expert_shapes(trial)
    )
    probe(parts_with_experts(trial, parts, gate_up, down).target(NUM_CACHES, MAX_LENGTH), parts)


@pytest.mark.parametrize("name", FORMS)
def test_packed_experts_give_the_bits_of_their_dequantized_twins(trial: Trial, name: str) -> None:
    parts, (code, group, has_offsets) = trial.parts(CudaKernels(linear="triton"), dtype="bfloat16"), FORMS[name]
    lengths, packed = SIZES.lengths[:2], []
    for shape in expert_shapes(trial):
        made = random_matrix(parts, code, shape, min(group, shape[1]), has_offsets)
        offsets = None if made.offsets is None else SMALLER * made.offsets
        packed.append(replace(made, scales=SMALLER * made.scales, offsets=offsets))
    digests = set()
    for gate_up, down in (packed, [each.dequantized() for each in packed]):
        target = parts_with_experts(trial, parts, gate_up, down).target(len(lengths), max(lengths) + ROOM)
        digests.add(work_digest(target, lengths))
    assert len(digests) == 1
