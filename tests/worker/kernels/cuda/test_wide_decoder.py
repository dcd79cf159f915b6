"""In forwards of 32 to 256 rows each row's bits are its own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import FEW_ROWS, ROW_CHOICES, narrower_rows
from tests.worker.kernels.cuda.arenas import Arena, Placed, random_arena, random_rows
from tests.worker.kernels.cuda.test_decoder import CPU, NUM_POSITIONS, run
from tests.worker.kernels.kernel_parts import FLOAT32, INDEXED, LATENTS, WITH_EXPERTS, Shape, random_weights
from tests.worker.kernels.packed_parts import packed_weights

pytestmark = pytest.mark.long

ROWS_OF_A_TREE = 8
NUM_ALONE, NUM_ALONE_EVERY_DAY = 16, 2  # compared rows; the interpreter takes a second for each
SHAPES = {
    "bfloat16": Shape(num_kv_heads=2, has_bias=True),
    "float32": Shape(dtype=FLOAT32),
    "experts": WITH_EXPERTS["glm4_moe"],
    "latent": LATENTS[0],
    "chosen": INDEXED[0],
    "experts, float32": WITH_EXPERTS["gpt_oss in float32"],
}
EVERY_DAY = {("experts", 128)}  # these attend like those without experts


def decoder_of(arena: Arena, num_rows: int) -> CudaDecoder:
    weights = stacked_weights(random_weights(arena.shape), CPU)
    kernels = CudaKernels(linear="triton", num_rows=num_rows)
    return CudaDecoder(weights, DeviceCaches(arena.buffer, NUM_POSITIONS), kernels)


def company(shape: Shape, num_rows: int) -> tuple[Arena, list[Placed]]:
    """Make as many trees as a forward holds, after texts of all lengths."""
    numbers = random.Random(num_rows)
    lengths = [numbers.choice((0, 64, 130, 200, 400, 520)) for _ in range(num_rows // ROWS_OF_A_TREE)]
    arena = random_arena(shape, lengths)
    return arena, random_rows(numbers, arena, [numbers.randint(4, ROWS_OF_A_TREE) for _ in lengths])


def in_other_order(decoder: CudaDecoder, placed: list[Placed]) -> tuple[Tensor, Tensor]:
    """Shuffle rows; return hidden states and logits in the order of `placed`."""
    found = [each.split([len(rows) for rows, _ in placed[::-1]]) for each in run(decoder, placed[::-1])]
    hidden, logits = (torch.cat(parts[::-1]) for parts in found)
    return hidden, logits


def alone(decoder: CudaDecoder, placed: list[Placed], number: int) -> tuple[Tensor, Tensor]:
    """Run one row, numbered over all trees, with its ancestors in the arena."""
    for rows, slot in placed:
        if number < len(rows):
            hidden, logits = run(decoder, [(rows.part(number, number + 1), slot)])
            return hidden[0], logits[0]
        number -= len(rows)
    raise AssertionError("no such row")


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [
        pytest.param(kind, num_rows, marks=() if (kind, num_rows) in EVERY_DAY else pytest.mark.slow)
        for kind in SHAPES
        for num_rows in ROW_CHOICES
    ],
)
def test_a_row_has_the_bits_in_company_that_it_has_alone(kind: str, num_rows: int) -> None:
    arena, placed = company(SHAPES[kind], num_rows)
    decoder = decoder_of(arena, num_rows)
    hidden, logits = run(decoder, placed)
    assert num_rows // 2 <= len(hidden) <= num_rows
    assert all(torch.equal(*pair) for pair in zip(in_other_order(decoder, placed), (hidden, logits), strict=True))
    num_alone = NUM_ALONE_EVERY_DAY if (kind, num_rows) in EVERY_DAY else NUM_ALONE
    for number in random.Random(3).sample(range(len(hidden)), num_alone):
        found = alone(decoder, placed, number)
        assert torch.equal(found[0], hidden[number]), number
        assert torch.equal(found[1], logits[number]), number


@pytest.mark.parametrize(
    "kind", ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("experts", "latent", "chosen"))]
)
def test_a_wide_forward_has_the_bits_of_a_narrow_one_and_of_its_own_narrow_forward(kind: str) -> None:
    arena, placed = company(SHAPES[kind], 64)
    others = arena.copy(), arena.copy()
    expected, wide = run(decoder_of(arena, 64), placed), decoder_of(others[0], 128)
    narrowed = decoder_of(others[1], 128).narrowed(64)
    for mine, its in zip((*run(wide, placed), *run(narrowed, placed)), 2 * expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forwards_of_every_number_of_rows_have_the_same_bits(is_packed: bool) -> None:
    """All forwards of one run, in its buffers; and of a run of 64 rows."""
    shape, most = SHAPES["bfloat16"], ROW_CHOICES[-1]
    arena, placed = company(shape, FEW_ROWS)
    weights = packed_weights(shape, "uint4", 16, has_offsets=True) if is_packed else random_weights(shape)
    stacked = stacked_weights(weights, CPU)
    assert stacked.gains_by_few_rows == is_packed

    def made(num_rows: int) -> CudaDecoder:
        caches = DeviceCaches(arena.copy().buffer, NUM_POSITIONS)
        return CudaDecoder(stacked, caches, CudaKernels(linear="triton", num_rows=num_rows))

    widest, expected = made(most), run(made(ROW_CHOICES[0]), placed)
    numbers = narrower_rows(most, has_few=True)
    assert numbers == (32, 64, 128)
    for decoder in (*map(widest.narrowed, numbers), widest):
        assert all(torch.equal(*pair) for pair in zip(run(decoder, placed), expected, strict=True))
