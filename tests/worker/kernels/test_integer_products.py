"""Products with rows of 8 bits follow their law to the bit, in every build and for every number of rows."""

from __future__ import annotations

import dataclasses
import weakref
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.kernel_operations import with_roof
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kernels.native_weights import ELEMENTS, quantized_rows
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, INTEGER_PIECE, TABLES, Code, PackedMatrix
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    VARIANTS,
    WITH_EXPERTS,
    Shape,
    chain,
    decoded_alone,
    needs_kernels,
    random_cache,
    whole,
)
from tests.worker.kernels.quantized_parts import packed_weights, random_packed, two_level_packed

pytestmark = [pytest.mark.long, needs_kernels]
CODES: tuple[Code, ...] = ("uint4", "e2m1", "iq4_nl", "int8", "uint8")
COLUMNS = 40  # no multiple of 16
DEPTHS = {16: 96, 32: 160, 128: 1280, 288: 576}  # by the size of a group
SHAPES = (Shape(hidden=64, intermediate=96), Shape(hidden=64, intermediate=96, dtype=FLOAT32, has_bias=True))


class IntegerProduct:
    """Rows times a packed matrix, in a variant."""

    def __init__(self, team: Team, matrix: PackedMatrix) -> None:
        self._team, self._library = team, with_roof(team.library)
        self._columns, depth = matrix.shape
        rows = quantized_rows(matrix, as_integers=True)
        assert rows is not None
        assert rows.call.as_integers
        element = ELEMENTS[matrix.dtype]
        self._handle = self._library.roof_matrix_quantized(element, depth, self._columns, rows.address)
        weakref.finalize(self, team.retire, self._library.roof_matrix_free, self._handle)

    def times(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), -(-self._columns // 16) * 16)
        self._library.roof_linear(self._team.handle, self._handle, len(rows), rows.data_ptr(), out.data_ptr())
        self._team.hold([rows, out])  # a late helper may still read them
        return out[:, : self._columns].contiguous()


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once to float32."""
    wide = (np.asarray(each.double().numpy(), dtype=np.longdouble) for each in torch.broadcast_tensors(a, b, c))
    first, second, third = wide
    return torch.from_numpy((first * second + third).astype(np.float32))


def by_the_law(matrix: PackedMatrix, rows: Tensor) -> Tensor:
    """Compute the product piece by piece, as source/integer_products.h has it."""
    codes = matrix.codes
    if CODE_BITS[matrix.code] == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    unit = 0.5 if matrix.code == "e2m1" else 1.0
    wholes = (TABLES[matrix.code][codes.int()] / unit).double()
    pieces = rows.unflatten(1, (-1, INTEGER_PIECE))
    largest = pieces.abs().amax(-1)
    row_scales = largest / 127
    numbers = (pieces * (127 / largest)[..., None]).round().flatten(1)
    sums = torch.zeros(len(rows), len(codes))
    depth = min(matrix.group_size, INTEGER_PIECE)
    for k in range(0, rows.shape[1], depth):
        scale, part = row_scales[:, k // INTEGER_PIECE, None], numbers[:, k : k + depth]
        group = k // matrix.group_size
        found = (part.double() @ wholes[:, k : k + depth].double().T).float()
        sums = fused(found, matrix.scales[:, group] * unit * scale, sums)
        if matrix.offsets is not None:
            sums = fused(matrix.offsets[:, group], scale * part.sum(1, keepdim=True), sums)
    return sums


def in_6_bits(matrix: PackedMatrix) -> PackedMatrix:
    codes = (matrix.codes.view(torch.int8) >> 2).view(torch.uint8) if matrix.code == "int8" else matrix.codes & 63
    return dataclasses.replace(matrix, codes=codes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("code", [*CODES, "int8 in 6 bits", "uint8 in 6 bits"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_follows_its_law_for_every_number_of_rows(variant: str, code: str) -> None:
    team, stored = Team(load_library(variant), 2), cast(Code, code.partition(" ")[0])
    for group_size, depth in DEPTHS.items():
        for offsets in (False, True):
            matrix = random_packed(stored, (COLUMNS, depth), group_size, offsets=offsets)
            matrix = matrix if code == stored else in_6_bits(matrix)
            product = IntegerProduct(team, matrix)
            rows = torch.randn(33, depth, generator=torch.Generator().manual_seed(depth))
            want = by_the_law(matrix, rows)
            for num_rows in (1, 2, 3, 7, 8, 33):
                assert torch.equal(product.times(rows[:num_rows].contiguous()), want[:num_rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_of_two_levels_follow_the_law(variant: str) -> None:
    team = Team(load_library(variant), 2)
    for matrix in (
        two_level_packed("uint4", (COLUMNS, 2048), 32, offsets=True),  # as Q4_K, deeper than a slice
        wide := two_level_packed("int8", (COLUMNS, 384), 16, offsets=False),
        in_6_bits(wide),  # as Q6_K
    ):
        rows = torch.randn(9, matrix.shape[1], generator=torch.Generator().manual_seed(3))
        assert torch.equal(IntegerProduct(team, matrix).times(rows), by_the_law(matrix, rows))


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_rows_give_zeros_or_no_numbers_and_disturb_no_other_row(variant: str) -> None:
    matrix = random_packed("uint4", (COLUMNS, 96), 32, offsets=True)
    rows = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    product = IntegerProduct(Team(load_library(variant), 2), matrix)
    before = product.times(rows)
    rows[1, 5], rows[2, 40], rows[3, 95] = torch.nan, torch.inf, -torch.inf
    rows[4] = 1e-38
    after = product.times(rows)
    assert after[1:4].isnan().all()
    assert (after[4] == 0).all()
    assert torch.equal(after[[0, 5]], before[[0, 5]])


@pytest.mark.parametrize("extreme", [0, 31, 63, 128, 224, 255])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_numbers_do_not_overflow(variant: str, code: Code, extreme: int) -> None:
    matrix = random_packed(code, (COLUMNS, 1280), 32)
    matrix = dataclasses.replace(matrix, codes=torch.full_like(matrix.codes, extreme))
    for rows in (torch.ones(3, 1280), -torch.ones(3, 1280)):
        found = IntegerProduct(Team(load_library(variant), 2), matrix).times(rows)
        assert torch.equal(found, by_the_law(matrix, rows))


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [*SHAPES, dataclasses.replace(WITH_EXPERTS["gpt_oss"], hidden=64)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_among_others_has_the_bits_of_plain_decoding(variant: str, shape: Shape) -> None:
    """Matrices here mix parts that take rows of 8 bits with parts that do not."""
    decoder = NativeDecoder(packed_weights(shape), 2, variant, as_integers=True)
    exact = NativeDecoder(packed_weights(shape), 2, variant)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    hidden, logits = whole(decoder.forward([chain(random_cache(shape, 70), tokens)]))
    assert logits.isfinite().all()
    own_hidden, own_logits = decoded_alone(decoder, random_cache(shape, 70), tokens)
    assert torch.equal(hidden[-1], own_hidden)
    assert torch.equal(logits[-1], own_logits)
    _, others = whole(exact.forward([chain(random_cache(shape, 70), tokens)]))
    assert not torch.equal(logits, others)
    assert (logits - others).abs().max() < 0.2 * others.abs().max()


def test_all_builds_agree_in_float32() -> None:
    shape = SHAPES[1]
    groups = [chain(random_cache(shape, 70), [3, 1, 4])]
    first, *others = (
        whole(NativeDecoder(packed_weights(shape), 2, each, as_integers=True).forward(groups))[1] for each in VARIANTS
    )
    assert all(torch.equal(first, each) for each in others)


def test_forms_that_integers_do_not_take_stay_as_they_are() -> None:
    e4m3 = random_packed("e4m3", (COLUMNS, 64), 32)
    groups_of_8, depth_of_80 = (random_packed("uint4", (COLUMNS, 80), size) for size in (8, 16))
    for matrix in (e4m3, groups_of_8, depth_of_80):
        rows = quantized_rows(matrix, as_integers=True)
        assert rows is not None
        assert not rows.call.as_integers
    assert e4m3.dtype == BF16
