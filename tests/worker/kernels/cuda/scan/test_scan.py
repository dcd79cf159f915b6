"""The GPU scan: exact best keys, clouds for the rest."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.scan_attention import ScanAttention
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, CUDA_SCALE_BYTES
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK, coded, numbers_of
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kv.scan_cache import ScannedKeys
from tests.worker.kernels.cuda.scan.scan_parts import FIRST, NAN, Rows, Texts
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, VARIANTS, needs_kernels

pytestmark = pytest.mark.long

NUM_BEST = 50
SEQUENCES = [Rows(2, 40, 3), Rows(0, 70, 2), Rows(1, 5, 9)]  # one is short, and one has more than a tile
SIZES = [(64, FLOAT32), pytest.param(128, BF16, marks=pytest.mark.slow)]
DEVIATIONS = (0.05, 2.0, 12.0)  # flat, medium and sharp attention
Attended = tuple[Texts, ScanAttention, Tensor, Tensor]  # with queries and their results


@functools.cache
def attended(head_dim: int, dtype: torch.dtype, deviation: float = 2.0, num_best: int = NUM_BEST) -> Attended:
    texts = Texts(SEQUENCES, num_best, head_dim, dtype)
    scan, query = texts.scan(), texts.queries(deviation)
    return texts, scan, query, texts.attended(scan, query)


def heads_of(texts: Texts, slots: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [
        (slot, row, head)
        for slot in slots
        for row, head in itertools.product(range(0, texts.sequences[slot].num_rows, 2), range(4))
    ]


@pytest.mark.parametrize(("head_dim", "dtype"), SIZES, ids=str)
def test_scores_are_products_with_what_codes_stand_for(head_dim: int, dtype: torch.dtype) -> None:
    texts, scan, query, _ = attended(head_dim, dtype)
    for slot, row, head in heads_of(texts, (0, 2)):
        expected = texts.scores(query[texts.rows_of(slot)][:, head], slot, head)[row]
        found = scan.found.samples[texts.rows_of(slot)][row, head, : len(expected)].double()
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("head_dim", "dtype"), SIZES, ids=str)
def test_the_best_keys_are_chosen_and_no_other(head_dim: int, dtype: torch.dtype) -> None:
    texts, scan, _, _ = attended(head_dim, dtype)
    for slot, row, head in heads_of(texts, (0, 2)):
        num_keys = texts.sequences[slot].num_chunks * SCAN_CHUNK
        scores = scan.found.samples[texts.rows_of(slot)][row, head, :num_keys]  # all of them are sampled
        ordered = scores.sort(descending=True).values
        expected = torch.nonzero(scores > ordered[NUM_BEST])[:, 0]  # of equal ones all or none
        assert texts.chosen(scan, slot, row, head).tolist() == expected.tolist()
        assert NUM_BEST - 2 <= len(expected) <= NUM_BEST


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "deviation"),
    [
        *((64, FLOAT32, deviation) for deviation in DEVIATIONS),
        *(pytest.param(128, BF16, each, marks=pytest.mark.slow if each != 2.0 else ()) for each in DEVIATIONS),
    ],
    ids=str,
)
def test_rows_see_entries_the_best_exactly_and_clouds_of_the_others(
    head_dim: int, dtype: torch.dtype, deviation: float
) -> None:
    texts, scan, query, found = attended(head_dim, dtype, deviation)
    for slot, row, head in heads_of(texts, (0, 1, 2)):
        expected = texts.exactly(scan, query, slot, row, head)
        tolerance = 1e-3 if dtype == FLOAT32 else 2e-2
        torch.testing.assert_close(
            found[texts.rows_of(slot)][row, head].double(), expected, atol=tolerance, rtol=tolerance
        )


def test_flat_queries_read_no_key_and_come_close_to_all_keys() -> None:
    texts, scan, query, found = attended(64, FLOAT32, 0.05)
    for slot in (0, 2):
        rows = texts.rows_of(slot)
        assert (scan.found.limits[rows] == float("inf")).all()
        assert all(texts.chosen(scan, slot, row, 0).numel() == 0 for row in range(texts.sequences[slot].num_rows))
        keys, values = (part[0].double() for part in texts.caches[slot].stored(0))
        end = FIRST + texts.sequences[slot].num_chunks * SCAN_CHUNK
        own = texts.entries[0, :, slot, 0, : texts.sequences[slot].num_entries + 1].double()
        seen = torch.cat([own[0], keys[FIRST:end]]), torch.cat([own[1], values[FIRST:end]])
        weights = (seen[0] @ query[rows][0, 0].double() * scan.scale).softmax(0)
        torch.testing.assert_close(found[rows][0, 0].double(), weights @ seen[1], atol=1e-2, rtol=0)


def test_of_the_text_only_keys_on_the_lists_are_read() -> None:
    texts, scan, query, found = attended(64, FLOAT32)
    others = Texts(SEQUENCES, NUM_BEST, 64, FLOAT32)
    for slot, kv_head in itertools.product((0, 2), range(2)):
        rows = range(texts.sequences[slot].num_rows)
        read = [texts.chosen(scan, slot, row, 2 * kv_head + head) for row in rows for head in range(2)]
        unread = torch.ones(others.full.shape[-2], dtype=torch.bool)
        unread[FIRST + torch.cat(read)] = False
        others.full[0, :, others.caches[slot].slot, kv_head, unread] = NAN
    assert torch.equal(others.attended(others.scan(), query), found)


def test_keys_in_8_bits_are_read_as_the_numbers_that_they_stand_for() -> None:
    texts = Texts([Rows(1, 5, 2)], NUM_BEST)
    codes = coded(texts.full, torch.int8, CUDA_SCALE_BYTES)
    found = []
    for full in (codes, numbers_of(codes, FLOAT32, 64)):
        texts.full = full
        texts.texts.addresses[0, 0] = full[0, 0, texts.caches[0].slot].data_ptr()
        found.append(texts.attended(texts.scan(), texts.queries()))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)


def test_rows_have_the_same_bits_again_and_without_other_sequences() -> None:
    texts, _, query, found = attended(64, FLOAT32)
    assert torch.equal(texts.attended(texts.scan(), query), found)
    alone = Texts([SEQUENCES[0]], NUM_BEST, 64, FLOAT32)
    mixed = alone.attended(alone.scan(), torch.cat([query[:3], torch.full_like(query[3:], NAN)]))
    assert torch.equal(mixed, found[:3])


def test_where_texts_are_long_some_blocks_say_where_the_best_begin() -> None:
    texts = Texts([Rows(9, 20, 1)], 256)  # 144 blocks: every second one is sampled
    scan, query = texts.scan(), texts.queries()
    texts.attended(scan, query)
    for head in range(4):
        scores = texts.scores(query[:1, head], 0, head)[0]
        sampled = scores.view(-1, BLOCK)[::2].flatten()
        torch.testing.assert_close(scan.found.samples[0, head, : len(sampled)].double(), sampled, atol=1e-3, rtol=0)
        limit = float(scan.found.limits[0, head])
        chosen = texts.chosen(scan, 0, 0, head)
        assert 170 < len(chosen) < 350
        is_chosen = torch.zeros(len(scores), dtype=torch.bool)
        is_chosen[chosen] = True
        assert scores[is_chosen].min() > limit - 1e-3
        assert scores[~is_chosen].max() < limit + 1e-3


@pytest.mark.sample(2)
@needs_kernels
@pytest.mark.parametrize(("num_best", "apart"), [(NUM_BEST, 0.15), (4 * SCAN_CHUNK, 0.02)], ids=["some", "all"])
@pytest.mark.parametrize(("head_dim", "dtype"), SIZES, ids=str)
def test_it_comes_to_nearly_the_same_as_the_compiled_kernels(
    head_dim: int, dtype: torch.dtype, num_best: int, apart: float
) -> None:
    """Thresholds may differ a little where keys are read, because scores have eight bits there."""
    texts, scan, query, found = attended(head_dim, dtype, num_best=num_best)
    for slot in (0, 2):
        cache, rows = texts.caches[slot], texts.rows_of(slot)
        length = FIRST + texts.sequences[slot].num_chunks * SCAN_CHUNK
        keys = ScannedKeys([cache.stored(0)], FIRST, length, num_best)
        keys.extend(length)
        codes = texts.texts.codes[0, slot, :, : keys._codes.shape[-1]]
        assert (codes == keys._codes[0]).float().mean() > 0.9999  # except keys at the border of a level
        first = texts.sequences[slot].num_entries
        own = texts.entries[0, :, slot, :, first : first + texts.sequences[slot].num_rows].transpose(1, 2).contiguous()
        away = []
        for seen in (keys, None):
            texts.partial[slot].scanned = seen
            team = Team(load_library(VARIANTS[0]), 1)
            compiled = native_attention(team, [texts.chain(slot)], 0, query[rows].contiguous(), *own, scan.scale)
            away.append(float((found[rows].double() - compiled.double()).norm() / compiled.double().norm()))
        assert away[0] < apart < 0.5 < away[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", [64, 1024])
def test_keys_in_pages_in_any_order_give_the_bits_of_keys_side_by_side(page: int) -> None:
    _, _, query, side_by_side = attended(64, FLOAT32)
    texts = Texts(SEQUENCES, NUM_BEST, page=page)
    assert torch.equal(texts.attended(texts.scan(), query), side_by_side)
