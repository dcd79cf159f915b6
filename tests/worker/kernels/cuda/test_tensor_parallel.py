"""A decoder on 2, 4 or 8 GPUs has the bits that it has on one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.peers import run_together
from swiftbatch.worker.kernels.cuda.rank_weights import shared_weights
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import IndexerSizes, MLASizes
from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES, Rank, kv_heads_of
from tests.worker.kernels.cuda.arenas import NAN, Arena, Placed, random_arena, random_rows
from tests.worker.kernels.cuda.test_decoder import CPU, NUM_POSITIONS, run, upload
from tests.worker.kernels.expert_parts import EXPERT_SHAPES
from tests.worker.kernels.kernel_parts import BEHIND, FLOAT32, Shape, random_weights

pytestmark = pytest.mark.long

KERNELS = CudaKernels(linear="triton")
WIDE = {"head_dim": 64, "num_kv_heads": 8, "group": 2, "intermediate": 1024}
SHAPES = {
    "dense": Shape(**WIDE, has_bias=True, has_qk_norm=True),
    "dense, float32, uneven parts": replace(Shape(**WIDE, dtype=FLOAT32, is_tied=False), intermediate=1168),
    "few heads of keys": replace(Shape(**WIDE), num_kv_heads=2, group=8),
    "no norms in front": replace(Shape(**WIDE), norms=BEHIND, windows=(40, None), caps=(3.0, 20.0)),
    "experts": Shape(**WIDE, experts=EXPERT_SHAPES["glm4_moe"]),
    "experts with biases and sinks": Shape(**WIDE, experts=EXPERT_SHAPES["gpt_oss"]),
    "chosen keys": Shape(
        head_dim=144, group=16, intermediate=1024, latent=MLASizes(80, 48, 16, 16, 64, IndexerSizes(17, 48, 100))
    ),
    "latent": Shape(head_dim=80, group=16, intermediate=1024, latent=MLASizes(48, 32, 32, 32, 64)),
}


def ranks_of(arena: Arena, num_ranks: int) -> list[CudaDecoder]:
    weights = shared_weights(random_weights(arena.shape), [CPU] * num_ranks)
    ranks = []
    for number, own in enumerate(weights):
        heads = kv_heads_of(arena.shape.num_kv_heads, Rank(number, num_ranks))
        caches = DeviceCaches(arena.buffer[:, :, :, heads].clone(), NUM_POSITIONS)
        ranks.append(CudaDecoder(own, caches, KERNELS))
    CudaDecoder.join(ranks)
    return ranks


def run_ranks(ranks: list[CudaDecoder], placed: list[Placed], last_first: bool = False) -> tuple[Tensor, Tensor]:
    """Run each rank up to the next meeting, in either order: none may read what another writes meanwhile."""
    for decoder in ranks:
        upload(decoder, placed)
        decoder.hidden.fill_(NAN)
        decoder.logits.fill_(NAN)
    in_order = [decoder.launches() for decoder in ranks]
    run_together(in_order[::-1] if last_first else in_order, [CPU] * len(ranks))
    num_rows = sum(len(rows) for rows, _ in placed)
    return ranks[0].hidden[:num_rows].clone(), ranks[0].logits[:num_rows].clone()


EVERY_DAY = {("dense", 8), ("few heads of keys", 4), ("experts", 2), ("latent", 4)}


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param(kind, num_ranks, marks=() if (kind, num_ranks) in EVERY_DAY else pytest.mark.slow)
        for kind in SHAPES
        for num_ranks in RANK_CHOICES[1:]
    ],
)
def test_ranks_have_the_bits_of_one_gpu(kind: str, num_ranks: int) -> None:
    arena = random_arena(SHAPES[kind], [64, 130, 200])
    placed = random_rows(random.Random(3), arena, [5, 3, 6])
    one = CudaDecoder(
        stacked_weights(random_weights(arena.shape), CPU), DeviceCaches(arena.buffer.clone(), NUM_POSITIONS), KERNELS
    )
    expected = run(one, placed)
    assert not expected[1].isnan().any()
    ranks = ranks_of(arena, num_ranks)
    for last_first in (False, True):
        found = run_ranks(ranks, placed, last_first)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
