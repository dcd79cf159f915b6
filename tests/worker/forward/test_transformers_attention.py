"""Split, gathered and merged attention is attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swiftbatch.worker.forward import transformers_attention
from swiftbatch.worker.forward.tile_packing import Tile, tail_mask, tree_rows
from swiftbatch.worker.forward.transformers_attention import (
    Asked,
    BatchInvariantRows,
    Seen,
    attend_in_groups,
    attention_by_definition,
)
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16


class Layer(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200])
def test_a_chain_attends_as_causal_attention_does(length: int) -> None:
    num_rows = 1 if length == 63 else 5
    torch.manual_seed(length)
    query = torch.randn(1, NUM_HEADS, num_rows, HEAD_DIM)
    keys, values = (torch.randn(1, NUM_KV_HEADS, length + num_rows, HEAD_DIM) for _ in range(2))
    cache = FullKVCache(CacheShape(1, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu")), 300)
    for part, whole in zip(cache.layer(0), (keys, values), strict=True):
        part[:, :length] = whole[0, :, :length]
    cache.advance(length)
    tile = Tile([tree_rows(cache, 1, DraftTree.chain([2] * (num_rows - 1)))], num_rows, num_rows)
    prepared = [BatchInvariantRows.prepare(part, torch.float32, torch.device("cpu")) for part in tile.parts]
    new_keys, new_values = keys[:, :, length:], values[:, :, length:]
    ours, _ = attend_in_groups(Layer(), query, new_keys, new_values, None, row_groups=prepared, scaling=0.25)
    mask = torch.ones(num_rows, length + num_rows).tril(length).bool()
    expected = scaled_dot_product_attention(query, keys, values, mask, scale=0.25, enable_gqa=True)
    assert torch.allclose(ours[0].transpose(0, 1), expected[0], atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_definition_is_the_kernel_s(masked: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 2, 4, HEAD_DIM)
    keys, values = (torch.randn(3, 2, 64, HEAD_DIM) for _ in range(2))
    mask = tail_mask([5, 64, 17], [0, 9, 0], torch.float32, torch.device("cpu")) if masked else None
    ours = attention_by_definition(query, keys, values, 0.3, mask)
    kernel = transformers_attention._flash(query, keys, values, 0.3, mask)
    for a, b in zip(ours, kernel, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("num_kv_heads", "group"), [(4, 1), (4, 2), (4, 3), (1, 6)])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size_on_two_threads(num_kv_heads: int, group: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    query = torch.randn(16, num_kv_heads, group, 64)
    keys, values = (torch.randn(16, num_kv_heads, 64, 64) for _ in range(2))
    mask = tail_mask([64] * 16, [0] * 16, torch.float32, torch.device("cpu"))

    def attended(rows: slice) -> tuple[torch.Tensor, ...]:
        return transformers_attention._each_row(query[rows], keys[rows], values[rows], 0.2, mask[rows])

    together = attended(slice(None))
    for first, end in ((0, 1), (1, 2), (0, 5), (7, 16)):
        for alone, whole in zip(attended(slice(first, end)), together, strict=True):
            assert torch.equal(alone, whole[first:end])


@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 5), (torch.bfloat16, 8)])
def test_a_row_of_one_head_of_keys_has_the_bits_on_three_threads_that_it_has_among_others(
    dtype: torch.dtype, group: int
) -> None:
    """A call with one head splits its products over threads, if torch may."""
    torch.set_num_threads(3)
    torch.manual_seed(0)
    query, tail = torch.randn(16, 1, group, 40).to(dtype), torch.randn(16, 1, 64, 40).to(dtype)
    prefix = torch.randn(1, 192, 40).to(dtype)
    mask = tail_mask([64] * 16, [0] * 16, dtype, torch.device("cpu"))

    def attended(rows: slice) -> list[torch.Tensor]:
        own = transformers_attention._each_row(query[rows], tail[rows], tail[rows], 0.2, mask[rows])
        return [*own, *transformers_attention._prefix(query[rows], prefix, prefix, Seen(0, mask[rows]), Asked(0.2))]

    together = attended(slice(None))
    for row in range(16):
        for alone, whole in zip(attended(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], whole[row])
