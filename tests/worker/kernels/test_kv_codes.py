"""8-bit keys and values equal their numbers in every reader."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.kv_codes import CODES, coded, numbers_of
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    VARIANTS,
    Shape,
    chain,
    coded_cache,
    decoded_alone,
    native,
    needs_kernels,
    whole,
)
from tests.worker.kv.scan_parts import Text, queries

KV_DTYPES: tuple[KVDtype, ...] = ("int8", "fp8")
KINDS = [(kv_dtype, dtype) for kv_dtype in KV_DTYPES for dtype in (BF16, FLOAT32)]


def rows_of(number: int, dtype: torch.dtype) -> Tensor:
    """Make keys of two heads `[number, 2, 64]` of all sizes, zeros, and values without codes."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(number, 2, 64, generator=generator) * 2.0 ** torch.randint(-9, 9, (number, 2, 1))
    rows[0] = 0.0
    rows[1, 0, 3], rows[1, 1, 5] = float("inf"), float("nan")
    rows[2] *= torch.linspace(0, 1, 64) ** 8  # down to the smallest exponent
    return rows.to(dtype)


def twin_of(cache: FullKVCache) -> FullKVCache:
    shape = dataclasses.replace(cache.shape, kv_dtype=None)
    twin = FullKVCache(shape, cache.rows.buffer.shape[-2], cache.shape.numbers(cache.rows.buffer))
    twin.advance(cache.length)
    return twin


@pytest.mark.parametrize(("codes", "most"), [(torch.int8, 1 / 127), (torch.uint8, 1 / 16)])
def test_a_code_is_the_nearest_number_of_its_row(codes: torch.dtype, most: float) -> None:
    rows = rows_of(40, FLOAT32)[3:]
    found = numbers_of(coded(rows, codes), FLOAT32, rows.shape[-1])
    largest = rows.abs().amax(dim=-1, keepdim=True)
    assert (found.abs().amax(dim=-1, keepdim=True) / largest - 1).abs().max() < 1e-6
    error = (found - rows).abs()
    assert (error <= (largest / 254 if codes == torch.int8 else rows.abs() * most + largest / 448 / 512) * 1.0001).all()


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kv_dtype", "dtype"), KINDS)
def test_kernels_and_torch_keep_the_same_bits(variant: str, kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    keys, values = rows_of(40, dtype), rows_of(40, dtype).flip(0)
    cache = FullKVCache(CacheShape(1, 2, 64, dtype, torch.device("cpu"), kv_dtype=kv_dtype), 64)
    cache.clear()
    team = Team(load_library(variant), 1)
    native_attention(team, [chain(cache, [0] * 40)], 0, torch.zeros(40, 2, 64, dtype=dtype), keys, values, 0.1)
    for found, rows in zip(cache.stored(0), (keys, values), strict=True):
        codes, scales = found[:, :40, :64], found[:, :40, 64:].contiguous().view(FLOAT32)
        expected = coded(rows, CODES[kv_dtype]).transpose(0, 1)
        assert torch.equal(codes, expected[..., :64])
        assert torch.equal(scales.nan_to_num(-1), expected[..., 64:].contiguous().view(FLOAT32).nan_to_num(-1))


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kv_dtype", "dtype"), KINDS)
def test_attention_to_codes_has_the_bits_of_attention_to_their_numbers(
    variant: str, kv_dtype: KVDtype, dtype: torch.dtype
) -> None:
    shape = Shape(head_dim=80, num_kv_heads=2, group=3, dtype=dtype)
    cache = coded_cache(shape, kv_dtype, 330)
    twin = twin_of(cache)
    generator = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(5, heads, 80, generator=generator).to(dtype) for heads in (6, 2, 2))
    new = [cache.shape.numbers(cache.shape.kept(each)) for each in (key, value)]
    team, rows = Team(load_library(variant), 1), [1, 2, 3, 4, 5]
    found = native_attention(team, [chain(cache, rows)], 1, query, key, value, 0.11)
    assert torch.equal(found, native_attention(team, [chain(twin, rows)], 1, query, *new, 0.11))
    assert torch.isfinite(found).all()


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kv_dtype", "dtype"), KINDS)
def test_a_row_of_a_tree_sees_its_own_key_as_later_rows_do(variant: str, kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, group=3)
    together, alone = (coded_cache(shape, kv_dtype, 200) for _ in range(2))
    tokens = [7 * each % shape.vocab for each in range(40)]
    hidden, logits = whole(native(shape, variant, 2).forward([chain(together, tokens)]))
    own_hidden, own_logits = decoded_alone(native(shape, variant), alone, tokens)
    assert torch.equal(hidden[-1], own_hidden)
    assert torch.equal(logits[-1], own_logits)
    together.advance(40)
    assert np.array_equal(together.kv(0, 240), alone.kv(0, 240))


@needs_kernels
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_scanned_codes_have_the_bits_of_scanned_numbers(kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    codes, numbers = Text(dtype=dtype), Text(dtype=dtype)
    codes.keep(dataclasses.replace(codes.shape, kv_dtype=kv_dtype))
    numbers.full.rows.buffer[:] = codes.full.shape.numbers(codes.full.rows.buffer)
    numbers.keep(numbers.shape)
    query = queries(codes)
    assert torch.equal(codes.attend(query, 64, VARIANTS[0]), numbers.attend(query, 64, VARIANTS[0]))
    assert torch.equal(codes.scanned(64)._moments, numbers.scanned(64)._moments)
