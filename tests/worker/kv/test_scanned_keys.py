"""Scanned keys: exact best ones, and a cloud of the others."""

from __future__ import annotations

import math

import pytest
import torch

from swiftbatch.worker.kernels.kv_codes import CLUSTER_CHUNKS, SCAN_CHUNK, flat_deviation
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import Layers, ScannedKeys
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels
from tests.worker.kv.scan_parts import LENGTH, NUM_CHUNKS, NUM_ENTRIES, Text, error, queries

pytestmark = needs_kernels
SIZES = [(64, torch.bfloat16), (64, torch.float32), (80, torch.float32), (96, torch.bfloat16), (128, torch.bfloat16)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("head_dim", "dtype"), SIZES)
def test_where_all_keys_are_among_the_best_attention_is_exact(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    text = Text(head_dim, dtype)
    query = queries(text)
    found = text.attend(query, LENGTH, variant)
    assert error(found, text.expected(query)) < (0.02 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.5, 40.0], ids=["flat", "between", "sharp", "one key"])
def test_the_best_few_and_the_cloud_of_the_others_come_close(deviation: float, variant: str) -> None:
    text = Text()
    query = queries(text, deviation=deviation)
    expected = text.expected(query)
    assert error(text.attend(query, 128, variant), expected) < 0.25
    # without two of three chunks it is far off
    assert error(text.attend(query, 128, variant, first=LENGTH - SCAN_CHUNK), expected) > 0.5


def test_a_key_that_stands_out_is_found_wherever_it_stands() -> None:
    text = Text(dtype=torch.bfloat16)
    keys, values = text.full.layer(0)
    query = queries(text, num_rows=1, deviation=1.5)
    for place in (NUM_ENTRIES + 1, LENGTH // 2, LENGTH - 1):
        found = text.full.layer(0)[0][0, place].clone(), values[0, place].clone()
        keys[0, place], values[0, place] = 12.0 * query[0, 0] / query[0, 0].norm() * 4.0, 5.0
        output = text.attend(query, 64, VARIANTS[0])
        torch.testing.assert_close(output[0, 0].float(), torch.full((64,), 5.0), atol=0.05, rtol=0)
        keys[0, place], values[0, place] = found


def test_a_row_has_the_same_bits_alone_and_beside_others_on_any_number_of_threads() -> None:
    text = Text(dtype=torch.bfloat16)
    query = queries(text, num_rows=5)
    together = text.attend(query, 64, VARIANTS[0])
    assert torch.equal(text.attend(query, 64, VARIANTS[0], num_threads=2), together)
    assert torch.equal(text.attend(query[:1], 64, VARIANTS[0])[0], together[0])


def test_codes_and_moments_are_the_same_however_the_text_came() -> None:
    text = Text()
    whole, parts = text.scanned(64), text.scanned(64, lengths=(100, SCAN_CHUNK + 5, 2 * SCAN_CHUNK, LENGTH))
    for name in ("_codes", "_means", "_spreads", "_moments"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert whole.end == parts.end == LENGTH


def test_many_heads_are_taken_in_by_any_number_of_threads_as_each_layer_alone() -> None:
    """More than are queued at once."""
    shape, length = CacheShape(5, 16, 16, torch.bfloat16, torch.device("cpu")), 2 * SCAN_CHUNK
    full = FullKVCache(shape, length)
    for layer in range(shape.num_layers):
        for part in full.layer(layer):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(layer)))
    layers = [full.stored(layer) for layer in range(shape.num_layers)]
    alone = [_taken_in([pair], length, num_threads=1) for pair in layers]
    for num_threads in (1, 2, 3):
        together = _taken_in(layers, length, num_threads)
        for name in ("_codes", "_means", "_spreads", "_moments"):
            expected = torch.cat([getattr(keys, name) for keys in alone])
            assert torch.equal(getattr(together, name), expected), (name, num_threads)


def _taken_in(layers: Layers, length: int, num_threads: int) -> ScannedKeys:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        keys = ScannedKeys(layers, 0, length, 64)
    finally:
        torch.set_num_threads(before)
    keys.extend(length)
    return keys


def test_moments_are_those_of_all_keys_and_values_of_a_cloud_changes_by_every_other_one() -> None:
    assert LENGTH <= SCAN_CHUNK * CLUSTER_CHUNKS
    text, head_dim = Text(), 64
    pair = torch.cat([part[1, :LENGTH].double() for part in text.full.layer(0)], dim=-1)
    moments = text.scanned(64)._moments[0, 1, 0].double()
    means, changes = moments[: 2 * head_dim], moments[2 * head_dim :].view(2, head_dim, head_dim)
    torch.testing.assert_close(means, pair.mean(dim=0), atol=1e-5, rtol=1e-4)
    chunks = pair.view(NUM_CHUNKS, SCAN_CHUNK, -1)
    away = chunks - chunks.mean(dim=1, keepdim=True)
    seen = away[:, ::2].flatten(0, 1)
    between = chunks.mean(dim=1) - pair.mean(dim=0)
    joint = seen.T @ seen / len(seen) + between.T @ between / NUM_CHUNKS  # [2 * head_dim, 2 * head_dim]
    expected = joint[:head_dim].unflatten(1, (2, head_dim)).transpose(0, 1)
    torch.testing.assert_close(changes, expected, atol=1e-4, rtol=1e-3)
    everything = (pair - pair.mean(dim=0)).T @ (pair - pair.mean(dim=0)) / LENGTH
    assert error(joint, everything) < 0.25


def test_a_code_says_on_which_side_of_the_mean_a_key_lies_and_whether_far() -> None:
    text = Text()
    scanned = text.scanned(64)
    keys = text.full.layer(0)[0][1, :SCAN_CHUNK].float()
    mean, spread = scanned._means[0, 1, 0], scanned._spreads[0, 1]
    blocks = scanned._codes[0, 1].view(-1, 16, 64)  # [blocks, head_dim / 4, keys]
    for key in (0, 63, 64, SCAN_CHUNK - 1):
        away = keys[key] - mean
        levels = [
            (0 if far else 1) if d < 0 else (3 if far else 2)
            for d, far in zip(away, away.abs() > 1.22 * spread, strict=True)
        ]
        codes = blocks[key // 64, :, key % 64].tolist()
        assert [code >> 2 * i & 3 for code in codes for i in range(4)] == levels


@pytest.mark.parametrize("num_keys", [1024, 10_240, 102_400])
def test_keys_are_read_where_the_best_weigh_a_tenth(num_keys: int) -> None:
    deviation = flat_deviation(256, num_keys)
    scores = deviation * torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.exp(scores.sort(descending=True).values)
    num_best = len(weights) * 256 // num_keys
    assert deviation == 0.0 or math.isclose(float(weights[:num_best].sum() / weights.sum()), 0.1, abs_tol=0.01)
