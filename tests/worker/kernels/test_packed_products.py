"""Packed products have the bits of their numbers' products, in every build."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.kernel_operations import with_roof
from swiftbatch.worker.kernels import native_decoder as native_module
from swiftbatch.worker.kernels.build import find_compiler
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.native_library import Team, load_library, open_library
from swiftbatch.worker.kernels.native_weights import ELEMENTS, quantized_rows
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, TABLES, Code, PackedMatrix
from tests.worker.kernels.compiled_once import compiled_once
from tests.worker.kernels.emulation import CAN_EMULATE, EMULATED, FLAGS_OF_EMULATION
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    SHAPES,
    VARIANTS,
    WITH_EXPERTS,
    Shape,
    chain,
    needs_kernels,
    random_cache,
    random_weights,
    whole,
)
from tests.worker.kernels.quantized_parts import KINDS, dequantized, packed_weights, random_packed, two_level_packed

pytestmark = [pytest.mark.long, needs_kernels]
PACKED_EXPERTS = (WITH_EXPERTS["gpt_oss"], WITH_EXPERTS["glm4_moe in float32"])

CODES = sorted(TABLES)
COLUMNS = 200  # no multiple of 16 * 8, so that some panels and blocks are incomplete
DEPTHS = {8: 48, 16: 80, 32: 160, 64: 192, 128: 1280, 144: 144, 288: 576}  # by the size of a group
ROW_COUNTS = (1, 2, 3, 8, 9, 32)
MOST_ROWS = 130  # more than a block of rows, only with the smallest groups, of which rows are independent


@pytest.fixture(scope="module")
def emulated() -> Path:
    compiler = find_compiler()
    assert compiler is not None
    return compiled_once(EMULATED, compiler, FLAGS_OF_EMULATION)


class Product:
    """Rows times a packed matrix, and times its numbers."""

    def __init__(self, team: Team, matrix: PackedMatrix) -> None:
        self._team, self._library = team, with_roof(team.library)
        self._columns, depth = matrix.shape
        rows = quantized_rows(matrix)
        assert rows is not None
        plain = torch.zeros(self._wide, depth, dtype=matrix.dtype)
        plain[: self._columns] = matrix.dequantized()
        element = ELEMENTS[matrix.dtype]
        self._packed = self._library.roof_matrix_quantized(element, depth, self._columns, rows.address)
        self._plain = self._library.roof_matrix_new(element, depth, self._wide, plain.data_ptr())
        for handle in (self._packed, self._plain):
            weakref.finalize(self, team.retire, self._library.roof_matrix_free, handle)

    @property
    def _wide(self) -> int:
        return -(-self._columns // 16) * 16

    def both(self, rows: Tensor) -> list[Tensor]:
        return [self._times(handle, rows) for handle in (self._packed, self._plain)]

    def _times(self, handle: int, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self._wide)
        self._library.roof_linear(self._team.handle, handle, len(rows), rows.data_ptr(), out.data_ptr())
        self._team.hold([rows, out])  # a late helper may still read them
        return out[:, : self._columns].contiguous().view(torch.int32)


def check_all(team: Team, matrix: PackedMatrix, row_counts: tuple[int, ...] = (*ROW_COUNTS, MOST_ROWS)) -> None:
    product = Product(team, matrix)
    generator = torch.Generator().manual_seed(9)
    for num_rows in row_counts:
        rows = torch.randn(num_rows, matrix.shape[1], generator=generator).to(matrix.dtype).float()
        packed, plain = product.both(rows)
        assert torch.equal(packed, plain), num_rows


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_has_the_bits_of_the_matrix_of_numbers(variant: str, code: Code, dtype: torch.dtype) -> None:
    team = Team(load_library(variant), 2)
    for number, (group_size, depth) in enumerate(DEPTHS.items()):
        scale_dtype = (torch.float16, torch.bfloat16, torch.float32)[number % 3]
        for offsets in (False, True):
            check_all(
                team,
                random_packed(
                    code,
                    (COLUMNS, depth),
                    group_size,
                    offsets=offsets,
                    dtype=dtype,
                    scale_dtype=scale_dtype,
                    seed=number,
                ),
                (1, 9) if number else (*ROW_COUNTS, MOST_ROWS),
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_number_halfway_between_two_of_bf16_becomes_the_even_one(variant: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    matrix = PackedMatrix("uint8", codes, signs, BF16, 256 * signs)  # of nine bits: each odd one is halfway
    packed, plain = Product(Team(load_library(variant), 1), matrix).both(torch.eye(256))
    assert torch.equal(packed, plain)
    assert sorted(set(plain.view(torch.float32)[:, 0].tolist())) == [256.0 + 2 * each for each in range(129)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_of_two_levels_have_the_bits_of_the_floats_that_they_stand_for(variant: str) -> None:
    team = Team(load_library(variant), 2)
    for dtype in (BF16, FLOAT32):
        matrix = two_level_packed("uint4", (COLUMNS, 512), 32, offsets=True)
        scales = matrix.scales.clone()
        scales[40, 3] = 1.0009765625  # one group's scale is no small multiple of the others' common part
        for each in (
            matrix,
            dataclasses.replace(matrix, scales=scales),
            two_level_packed("int8", (40, 384), 16, offsets=False),
        ):
            check_all(team, dataclasses.replace(each, dtype=dtype))


@pytest.mark.long
@pytest.mark.skipif(not CAN_EMULATE, reason="the processor has tiles of its own, or no products of bf16")
@pytest.mark.parametrize("code", CODES)
def test_tiles_give_the_bits_of_the_matrix_of_numbers(emulated: Path, code: Code) -> None:
    team = Team(open_library(emulated), 2)
    for group_size, depth in ((16, 80), (32, 160), (288, 576)):
        check_all(team, random_packed(code, (COLUMNS, depth), group_size, offsets=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4], *PACKED_EXPERTS], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_with_packed_layers_has_the_bits_of_its_twin(variant: str, shape: Shape) -> None:
    packed, twin = (
        NativeDecoder(each, 2, variant) for each in (packed_weights(shape), dequantized(packed_weights(shape)))
    )
    for length, tokens in ((0, [3]), (70, [1, 2, 3]), (64, list(range(40)))):
        mine, its = (whole(each.forward([chain(random_cache(shape, length), tokens)])) for each in (packed, twin))
        for found, want in zip(mine, its, strict=True):
            assert torch.isfinite(found).all()
            assert torch.equal(found, want)


def test_a_packed_matrix_is_not_dequantized_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    weights = packed_weights(shape)
    names: list[Code] = []

    def dequantize(self: PackedMatrix) -> Tensor:
        names.append(self.code)
        return torch.zeros(self.shape, dtype=self.dtype)

    monkeypatch.setattr(PackedMatrix, "dequantized", dequantize)
    native_module.NativeDecoder(weights, 1, VARIANTS[0])
    assert names == ["uint4", "uint4"]  # those with groups of two


def test_numbers_that_the_kernels_would_not_give_to_the_bit_are_taken_as_numbers() -> None:
    matrix = random_packed("e4m3", (16, 32), 16)
    assert quantized_rows(matrix) is not None
    codes, scales = matrix.codes.clone(), matrix.scales.clone()
    codes[3, 5] = 255  # no number
    assert quantized_rows(dataclasses.replace(matrix, codes=codes)) is None
    scales[3, 1] = 2.0**120  # converted through a larger number
    assert quantized_rows(dataclasses.replace(matrix, scales=scales)) is None
    assert quantized_rows(dataclasses.replace(matrix, offsets=scales)) is None
    scales[3, 1] = 2.0**-126  # its numbers are below what products treat as nonzero
    assert quantized_rows(dataclasses.replace(matrix, scales=scales)) is None
    zeros = torch.zeros_like(codes)
    assert quantized_rows(dataclasses.replace(matrix, codes=zeros, scales=scales)) is not None


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scales_are_kept_in_as_few_bytes_as_hold_them(scale_dtype: torch.dtype) -> None:
    matrix = random_packed("uint4", (16, 32), 16, offsets=True, scale_dtype=scale_dtype)
    rows = quantized_rows(matrix)
    assert rows is not None
    assert rows.num_bytes == 16 * 32 * CODE_BITS["uint4"] // 8 + 2 * 2 * 16 * scale_dtype.itemsize


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("code", "group_size", "offsets"), KINDS[:-2])
def test_a_packed_embedding_has_the_rows_of_its_numbers(
    variant: str, code: Code, group_size: int, offsets: bool
) -> None:
    for dtype, scale_dtype in ((BF16, torch.float16), (FLOAT32, FLOAT32), (BF16, BF16)):
        shape = Shape(dtype=dtype, is_scaled=True)
        size = (shape.vocab, shape.hidden)
        rows = random_packed(code, size, group_size, offsets=offsets, dtype=dtype, scale_dtype=scale_dtype)
        packed, twin = (
            NativeDecoder(dataclasses.replace(random_weights(shape), embedding=each), 1, variant)
            for each in (rows, rows.dequantized())
        )
        tokens = torch.tensor([[3, 99, 0], [17, 17, 64]])
        assert packed.embedding is rows
        assert torch.equal(packed.embed(tokens), twin.embed(tokens))
        found = [whole(each.forward([chain(random_cache(shape, 3), [5, 99, 0, 41])])) for each in (packed, twin)]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
