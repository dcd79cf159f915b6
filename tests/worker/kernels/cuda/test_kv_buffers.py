"""8-bit keys and values in CUDA have torch's codes."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.cuda.kv_kernels import (
    E4M3_PAIRS,
    INT8_PAIRS,
    average_chunks,
    gather_entries,
    gather_range,
)
from swiftbatch.worker.kernels.cuda.row_kernels import rope_store
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer, Scratch, attend
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES, HEAD_BLOCKS, KV_SCALE_BYTES, NUM_ROWS, num_splits
from swiftbatch.worker.kernels.kv_codes import CODES, coded, numbers_of
from tests.worker.kernels.cuda.arenas import CAPACITY, Arena, arena_of, padded, random_arena, random_rows
from tests.worker.kernels.cuda.ptx_on_cpu import run
from tests.worker.kernels.cuda.test_decoder import is_near
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, Shape

KINDS = [("int8", BF16), ("fp8", FLOAT32), pytest.param("int8", FLOAT32, marks=pytest.mark.slow)]
KINDS += [pytest.param("fp8", BF16, marks=pytest.mark.slow)]
SMALL = Shape(group=3, head_dim=48)


def kept(arena: Arena, kv_dtype: KVDtype) -> Arena:
    return arena_of(
        arena.shape, coded(arena.buffer, CODES[kv_dtype], CUDA_SCALE_BYTES), [cache.length for cache in arena.caches]
    )


def attended(arena: Arena, query: Tensor, seed: int) -> Tensor:
    scratch = Scratch.empty(num_splits(CAPACITY, HEAD_BLOCKS), *query.shape[1:], torch.device("cpu"), NUM_ROWS)
    mixed = padded(query[:0])
    sequences = random_rows(random.Random(seed), arena, (3, 1))
    heads = arena.shape
    shape = AttentionShape(heads.num_kv_heads, heads.group, heads.head_dim, query.dtype)
    attend(shape, padded(query), KeptLayer(*arena.buffer[1]), arena.table(sequences), scratch, mixed, 0.1)
    return mixed[:4]


@pytest.mark.long
@pytest.mark.parametrize(("kv_dtype", "dtype"), KINDS)
def test_attention_to_codes_is_near_attention_to_their_numbers(kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    """Scales are factors of scores and probabilities, so only rounding differs."""
    shape = dataclasses.replace(SMALL, dtype=dtype)
    whole = random_arena(shape, (150, 70))
    for slot, cache in enumerate(whole.caches):  # the rows of the step
        whole.buffer[:, :, slot, :, cache.length : cache.length + 3] = 0.25
    codes = kept(whole, kv_dtype)
    numbers = arena_of(shape, numbers_of(codes.buffer, dtype, shape.head_dim), (150, 70))
    query = torch.randn(4, shape.num_kv_heads * shape.group, shape.head_dim).to(dtype)
    found, expected = (attended(arena, query, 5) for arena in (codes, numbers))
    assert is_near(found, expected, dtype)


@pytest.mark.parametrize(("kv_dtype", "dtype"), KINDS)
def test_a_step_keeps_the_codes_that_torch_keeps(kv_dtype: KVDtype, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SMALL, dtype=dtype)
    plain = random_arena(shape, (5, 70))
    codes = kept(plain, kv_dtype)
    sequences = random_rows(random.Random(2), plain, (4, 2))
    generator = torch.Generator().manual_seed(3)
    heads = shape.num_kv_heads * (shape.group + 2)
    qkv = padded(torch.randn(6, heads * shape.head_dim, generator=generator).to(dtype))
    qkv[1] = 0  # rows of zeros, of tiny numbers, and a NaN
    qkv[2] *= 1e-20
    qkv[3, -1] = float("inf")
    turns = torch.randn(CAPACITY, shape.head_dim, generator=generator).to(dtype)
    for arena in (plain, codes):
        query = torch.empty(NUM_ROWS, shape.num_kv_heads * shape.group, shape.head_dim, dtype=dtype)
        rope_store(qkv, turns, None, 1e-5, arena.table(sequences).rows, query, *arena.buffer[0])
    for rows, slot in sequences:
        entries = slice(rows.first_entry, rows.first_entry + len(rows))
        found, numbers = (arena.buffer[0, :, slot, :, entries] for arena in (codes, plain))
        used = slice(0, shape.head_dim + KV_SCALE_BYTES)
        assert torch.equal(found[..., used], coded(numbers, CODES[kv_dtype]))


@pytest.mark.parametrize("kv_dtype", CODES)
def test_copies_and_means_of_codes_are_of_their_numbers(kv_dtype: KVDtype) -> None:
    source = coded(torch.randn(2, 2, 2, 70, 48).to(BF16), CODES[kv_dtype], CUDA_SCALE_BYTES)
    numbers = numbers_of(source, BF16, 48)
    entries = torch.randint(0, 70, (2, 2, 9), dtype=torch.int32)
    chosen, some = (torch.zeros(2, 2, 2, length, 48, dtype=BF16) for length in (9, 40))
    expected, means = chosen.clone(), [torch.zeros(2, 2, 3, 48, dtype=BF16) for _ in range(2)]
    gather_entries(source, entries, chosen)
    gather_entries(numbers, entries, expected)
    gather_range(source, 20, some)
    for given, out in zip((source, numbers), means, strict=True):
        average_chunks(given[:, 0], 4, 20, out)
    assert torch.equal(chosen, expected)
    assert torch.equal(some, numbers[..., 20:60, :])
    assert torch.equal(*means)


@pytest.mark.parametrize(
    ("assembly", "code"), [(INT8_PAIRS, torch.int8), (E4M3_PAIRS, torch.float8_e4m3fn)], ids=["int8", "e4m3"]
)
def test_a_gpu_s_assembly_gives_the_number_of_every_code(assembly: tl.constexpr, code: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    if code != torch.int8:
        codes[codes & 127 == 127] = 0  # NaN is never kept
    words = torch.from_numpy(codes.view(np.uint32).astype(np.int64)).flatten()
    found = torch.cat(run(assembly.value, words, 2), -1).view(2, 128)
    assert torch.equal(found.float(), torch.from_numpy(codes).view(code).float())
