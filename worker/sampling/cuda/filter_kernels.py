"""Triton kernels of top-k, top-p, min-p and eta, which find a row's cut in the order (score, token) without sorting.

The search goes byte by byte through the ranks: it sums weights by the value of a byte, and selects the value with the
cut. Integer sums have the same bits in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.worker.sampling.cuda.logits_kernels import SLOT, TEMPERATURE, order_of, real, row_peak, temper, whole
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK, column_of

TOP_K_COLUMN = tl.constexpr(column_of("top_k"))
REST = tl.constexpr(column_of("rest"))
LOG_MIN_P = tl.constexpr(column_of("log_min_p"))
ETA_COLUMN = tl.constexpr(column_of("eta"))
ROOT_ETA = tl.constexpr(column_of("root_eta"))
WEIGHT_UNITS = tl.constexpr(2.0**44)  # sums of MAX_VOCAB weights e^(score - best) stay below 2^63
MASS_UNITS = tl.constexpr(2.0**60)  # a probability of 1 plus its rounding error stays below 2^63
TOP_K, TOP_P, ETA = (tl.constexpr(number) for number in range(3))  # filters that need a search
TOKEN_BYTES = tl.constexpr(3)  # bytes of the token id, after the four bytes of the score
RANK_BYTES = tl.constexpr(7)
NO_RANK = tl.constexpr(1 << 56)  # above all ranks
BELOW = tl.constexpr(RANK_BYTES * 256)  # index of the sum for tokens that are too unlikely to be the cut
TOTAL, SPREAD, LOWEST = (tl.constexpr(RANK_BYTES * 256 + number) for number in (1, 2, 3))
NUM_SUMS = tl.constexpr(RANK_BYTES * 256 + 4)
SEARCH_BLOCK, NUM_WARPS = 4096, 16


@triton.jit
def rank_in_row(scores, tokens):
    """Return an int64 of 7 bytes that orders tokens by score, then by id."""
    return ((order_of(scores).to(tl.int64) + 0x80000000) << (TOKEN_BYTES * 8)) | tokens


@triton.jit
def temper_blocks(rows_ptr, scores_ptr, peaks_ptr, tempered_ptr, vocab, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Store tempered scores `[num_rows, vocab]` of rows that are drawn with noise."""
    row, block = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    peak = row_peak(peaks_ptr + (tl.num_programs(0) + row) * num_blocks, num_blocks, WIDTH)
    temperature = real(rows_ptr, row, TEMPERATURE)
    if (whole(rows_ptr, row, SLOT) >= 0) & (tl.abs(peak) < float("inf")) & (temperature > 0.0):
        places = row.to(tl.int64) * vocab + block * BLOCK + tl.arange(0, BLOCK)
        inside = block * BLOCK + tl.arange(0, BLOCK) < vocab
        scores = tl.load(scores_ptr + places, mask=inside, other=0.0)
        tl.store(tempered_ptr + places, temper(scores, peak, temperature), mask=inside)


@triton.jit
def asked(rows_ptr, peaks_ptr, row, vocab, num_blocks, FILTER: tl.constexpr, WIDTH: tl.constexpr):
    """Return whether a row uses a filter, and its best tempered score."""
    peak = row_peak(peaks_ptr + (tl.num_programs(0) + row) * num_blocks, num_blocks, WIDTH)
    temperature = real(rows_ptr, row, TEMPERATURE)
    is_asked = (whole(rows_ptr, row, SLOT) >= 0) & (tl.abs(peak) < float("inf")) & (temperature > 0.0)
    if FILTER == TOP_K:
        top_k = whole(rows_ptr, row, TOP_K_COLUMN)
        is_asked = is_asked & (top_k > 0) & (top_k < vocab)
    elif FILTER == TOP_P:
        is_asked = is_asked & (real(rows_ptr, row, REST) >= 0.0)
    else:
        is_asked = is_asked & (real(rows_ptr, row, ETA_COLUMN) > 0.0)
    return is_asked, temper(peak, peak, tl.where(is_asked, temperature, 1.0))


@triton.jit
def left_in_block(
    rows_ptr, tempered_ptr, cuts_ptr, row, vocab, best, FILTER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return scores and ranks of a block's tokens, and a mask of those that earlier filters keep."""
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(tempered_ptr + row.to(tl.int64) * vocab + tokens, mask=tokens < vocab, other=float("-inf"))
    ranks = rank_in_row(scores, tokens)
    is_left = (tokens < vocab) & (ranks >= tl.load(cuts_ptr + row))
    if FILTER == ETA:  # min-p comes before eta
        is_left = is_left & (scores >= best + real(rows_ptr, row, LOG_MIN_P))
    return scores, ranks, is_left


@triton.jit
def weights(scores, is_left, best):
    """Return e^(score - best) of kept tokens, 0 of others, and the distances best - score."""
    distances = best - tl.where(is_left, scores, float("-inf"))
    return tl.exp(-distances), distances


@triton.jit
def in_units(sums_ptr, place):
    return tl.load(sums_ptr + place).to(tl.float64) / WEIGHT_UNITS


@triton.jit
def sum_weights(
    rows_ptr, peaks_ptr, tempered_ptr, cuts_ptr, sums_ptr, vocab, num_blocks,
    FILTER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the weights of kept tokens, and their weights times distances for the entropy."""
    row = tl.program_id(0)
    is_asked, best = asked(rows_ptr, peaks_ptr, row, vocab, num_blocks, FILTER, WIDTH)
    if is_asked:
        scores, _, is_left = left_in_block(rows_ptr, tempered_ptr, cuts_ptr, row, vocab, best, FILTER, BLOCK)
        weight, distance = weights(scores, is_left, best)
        weight = weight.to(tl.float64) * WEIGHT_UNITS
        spread = tl.where(weight > 0.0, weight * distance.to(tl.float64), 0.0)
        sums = sums_ptr + row * NUM_SUMS
        tl.atomic_add(sums + TOTAL, tl.sum(weight.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums + SPREAD, tl.sum(spread.to(tl.int64), 0), sem="relaxed")


@triton.jit
def cut_bytes(rows_ptr, row, sums_ptr, vocab, FILTER: tl.constexpr, NUM_BYTES: tl.constexpr):
    """Return the first bytes of the cut's rank, where the filter's cumulative sum first exceeds its limit.

    Top-k counts the removed tokens, top-p sums their mass.
    """
    found, below = tl.zeros([], tl.int64), tl.load(sums_ptr + BELOW)
    values = tl.arange(0, 256)
    for number in tl.static_range(NUM_BYTES):
        sums = tl.load(sums_ptr + number * 256 + values)
        so_far = tl.cumsum(sums, 0)
        if FILTER == TOP_K:
            goes = below + so_far <= vocab - whole(rows_ptr, row, TOP_K_COLUMN)
        else:
            goes = ((below + so_far).to(tl.float64) / MASS_UNITS).to(tl.float32) <= real(rows_ptr, row, REST)
        value = tl.sum((goes & (so_far < tl.sum(sums, 0))).to(tl.int32), 0)
        below += tl.sum(tl.where(values < value, sums, 0), 0)
        found = (found << 8) | value
    return found


@triton.jit
def sum_bytes(
    rows_ptr, peaks_ptr, tempered_ptr, cuts_ptr, sums_ptr, vocab, num_blocks,
    FILTER: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum tokens whose rank begins with the bytes found so far, by the next byte."""
    row = tl.program_id(0)
    is_asked, best = asked(rows_ptr, peaks_ptr, row, vocab, num_blocks, FILTER, WIDTH)
    if is_asked:
        scores, ranks, is_left = left_in_block(rows_ptr, tempered_ptr, cuts_ptr, row, vocab, best, FILTER, BLOCK)
        sums = sums_ptr + row * NUM_SUMS
        found, shift = cut_bytes(rows_ptr, row, sums, vocab, FILTER, NUMBER), (RANK_BYTES - 1 - NUMBER) * 8
        is_opened = is_left & ((ranks >> shift >> 8) == found)
        values = (ranks >> shift) & 255
        sums += NUMBER * 256
        if FILTER == TOP_K:
            counts = tl.histogram(values.to(tl.int32), 256, mask=is_opened).to(tl.int64)
            tl.atomic_add(sums + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")
        else:
            total, rest = in_units(sums_ptr + row * NUM_SUMS, TOTAL), real(rows_ptr, row, REST)
            weight, _ = weights(scores, is_left, best)
            mass = (tl.math.div_rn(weight, total.to(tl.float32)).to(tl.float64) * MASS_UNITS).to(tl.int64)
            # All tokens below this together have at most half of `rest`, so none of them is the cut.
            floor = best + tl.log(rest * total.to(tl.float32) / (2.0 * vocab))
            if NUMBER == 0:
                unlikely = tl.sum(tl.where(scores < floor, mass, 0), 0)
                tl.atomic_add(sums + BELOW, unlikely, sem="relaxed")
            tl.atomic_add(sums + values, mass, mask=is_opened & (scores >= floor), sem="relaxed")


@triton.jit
def find_lowest(
    rows_ptr, peaks_ptr, tempered_ptr, cuts_ptr, sums_ptr, vocab, num_blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Find the lowest rank that eta keeps: probabilities of at least min(eta, sqrt(eta) e^-entropy) (Hewitt et al.
    2022).

    It is stored as its distance from `NO_RANK`; 0 means none.
    """
    row = tl.program_id(0)
    is_asked, best = asked(rows_ptr, peaks_ptr, row, vocab, num_blocks, ETA, WIDTH)
    if is_asked:
        scores, _, is_left = left_in_block(rows_ptr, tempered_ptr, cuts_ptr, row, vocab, best, ETA, BLOCK)
        sums = sums_ptr + row * NUM_SUMS
        total, spread = in_units(sums, TOTAL), in_units(sums, SPREAD)
        entropy = tl.log(total) + spread / total
        eta, root_eta = real(rows_ptr, row, ETA_COLUMN), real(rows_ptr, row, ROOT_ETA)
        least = tl.minimum(root_eta * tl.exp(-entropy.to(tl.float32)), eta)
        weight, _ = weights(scores, is_left, best)
        stays = is_left & ((tl.math.div_rn(weight, total.to(tl.float32)) >= least) | (scores == best))
        lowest = tl.min(tl.where(stays, rank_in_row(scores, 0), NO_RANK), 0)
        tl.atomic_max(sums + LOWEST, -lowest + NO_RANK, sem="relaxed")


@triton.jit
def settle_cuts(
    rows_ptr, peaks_ptr, cuts_ptr, sums_ptr, vocab, num_blocks,
    FILTER: tl.constexpr, NUM_BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store each row's lowest kept rank, `[num_rows] int64`; rows without this filter keep their earlier cut."""
    row = tl.program_id(0)
    is_asked, _ = asked(rows_ptr, peaks_ptr, row, vocab, num_blocks, FILTER, WIDTH)
    if is_asked:
        sums, cut = sums_ptr + row * NUM_SUMS, tl.load(cuts_ptr + row)
        if FILTER == ETA:
            cut = tl.maximum(cut, -tl.load(sums + LOWEST) + NO_RANK)
        else:
            found = cut_bytes(rows_ptr, row, sums, vocab, FILTER, NUM_BYTES)
            cut = tl.maximum(cut, found << ((RANK_BYTES - NUM_BYTES) * 8))
        tl.store(cuts_ptr + row, cut)


class RowCuts:
    """Finds each row's cut by the filters, with the same launches for all rows."""

    def __init__(self, rows: torch.Tensor, scores: torch.Tensor, peaks: torch.Tensor) -> None:
        """`scores [num_rows, vocab]` are those before division by the temperature."""
        self._rows, self._scores, self._peaks = rows, scores, peaks
        num_rows, vocab_size = scores.shape
        self._tempered = torch.zeros_like(scores)
        # the lowest rank that each row keeps
        self.ranks = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
        self._sums = torch.zeros(3, num_rows, NUM_SUMS.value, dtype=torch.int64, device=scores.device)
        self._sums_of = list(self._sums)
        self._width = triton.next_power_of_2(peaks.shape[2])
        self._grid = (num_rows, triton.cdiv(vocab_size, SEARCH_BLOCK))

    def launch(self) -> None:
        num_rows, num_blocks = self._peaks.shape[1:]
        self.ranks.zero_()
        self._sums.zero_()
        given = self._rows, self._scores, self._peaks, self._tempered, self._scores.shape[1]
        temper_blocks[(num_rows, num_blocks)](*given, BLOCK=BLOCK, WIDTH=self._width, num_warps=NUM_WARPS)
        self._search(TOP_K.value, RANK_BYTES.value - TOKEN_BYTES.value)  # top-k keeps all tokens of one score
        self._over_blocks(sum_weights, TOP_P.value, FILTER=TOP_P.value)
        self._search(TOP_P.value, RANK_BYTES.value)
        self._over_blocks(sum_weights, ETA.value, FILTER=ETA.value)
        self._over_blocks(find_lowest, ETA.value)
        self._settle(ETA.value)

    def _search(self, number: int, num_bytes: int) -> None:
        for byte in range(num_bytes):
            self._over_blocks(sum_bytes, number, FILTER=number, NUMBER=byte)
        self._settle(number, num_bytes)

    def _over_blocks(self, kernel: triton.JITFunction, number: int, **constants: int) -> None:
        sizes = self._scores.shape[1], self._peaks.shape[2]
        given = self._rows, self._peaks, self._tempered, self.ranks, self._sums_of[number]
        kernel[self._grid](*given, *sizes, **constants, BLOCK=SEARCH_BLOCK, WIDTH=self._width, num_warps=NUM_WARPS)

    def _settle(self, number: int, num_bytes: int = 0) -> None:
        sizes = self._scores.shape[1], self._peaks.shape[2]
        given = self._rows, self._peaks, self.ranks, self._sums_of[number]
        settle_cuts[(len(self._rows),)](*given, *sizes, FILTER=number, NUM_BYTES=num_bytes, WIDTH=self._width)
