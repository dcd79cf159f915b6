"""Triton kernels of top-k, top-p, min-p and eta, over sorted rows or only over the best tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.triton_primitives import byte_at, count_bytes
from swiftbatch.worker.sampling.cuda.logits_kernels import (
    SLOT,
    TEMPERATURE,
    number_of,
    order_of,
    real,
    row_peak,
    temper,
    whole,
)
from swiftbatch.worker.sampling.cuda.sampling_rows import column_of

TOP_K_COLUMN = tl.constexpr(column_of("top_k"))
REST = tl.constexpr(column_of("rest"))
LOG_MIN_P = tl.constexpr(column_of("log_min_p"))
ETA = tl.constexpr(column_of("eta"))
ROOT_ETA = tl.constexpr(column_of("root_eta"))
WEIGHT_UNITS = tl.constexpr(2.0**44)  # of a weight e^(score - peak): as many as MAX_VOCAB of them stay below 2^63
MASS_UNITS = tl.constexpr(2.0**60)  # of a probability: 1 and its rounding stay below 2^63


@triton.jit
def has_filters(rows_ptr, row):
    """Return whether anything but min-p cuts the row."""
    cuts = (whole(rows_ptr, row, TOP_K_COLUMN) > 0) | (real(rows_ptr, row, REST) >= 0.0)
    return cuts | (real(rows_ptr, row, ETA) > 0.0)


@triton.jit
def is_cut(rows_ptr, row, peak):
    """Return whether a row has to be sorted."""
    return has_filters(rows_ptr, row) & (tl.abs(peak) < float("inf")) & (real(rows_ptr, row, TEMPERATURE) > 0.0)


@triton.jit
def temper_blocks(rows_ptr, scores_ptr, peaks_ptr, tempered_ptr, vocab, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Scores to be sorted, `[num_rows, vocab]`; other rows keep what is there."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    num_blocks = tl.num_programs(1)
    peak = row_peak(peaks_ptr + (tl.num_programs(0) + row) * num_blocks, num_blocks, WIDTH)
    if is_cut(rows_ptr, row, peak):
        places = row.to(tl.int64) * vocab + block * BLOCK + tl.arange(0, BLOCK)
        inside = block * BLOCK + tl.arange(0, BLOCK) < vocab
        scores = temper(tl.load(scores_ptr + places, mask=inside, other=0.0), peak, real(rows_ptr, row, TEMPERATURE))
        tl.store(tempered_ptr + places, tl.where(scores == 0.0, 0.0, scores), mask=inside)  # no -0: a sort tells them


@triton.jit
def first_from(sorted_ptr, start, end, floor):
    """The first place between `start` and `end` whose score is no less than `floor`; `end` without one."""
    while start < end:
        middle = (start + end) // 2
        is_less = tl.load(sorted_ptr + middle) < floor
        start = tl.where(is_less, middle + 1, start)
        end = tl.where(is_less, end, middle)
    return start


@triton.jit
def weights(sorted_ptr, places, start, vocab, peak):
    """e^(score - peak) at some places, and the distances peak - score; nothing before `start`."""
    inside = (places >= start) & (places < vocab)
    distances = peak - tl.load(sorted_ptr + places, mask=inside, other=float("-inf"))
    return tl.exp(-distances), distances


@triton.jit
def denominator(sorted_ptr, start, vocab, peak, BLOCK: tl.constexpr):
    """Sum of the weights from a place on, float64; and that of weight times distance, their entropy's part."""
    total = tl.zeros([], tl.int64)
    spread = tl.zeros([], tl.int64)
    for first in range(start // BLOCK * BLOCK, vocab, BLOCK):
        weight, distance = weights(sorted_ptr, first + tl.arange(0, BLOCK), start, vocab, peak)
        weight = weight.to(tl.float64) * WEIGHT_UNITS
        total += tl.sum(weight.to(tl.int64), 0)
        spread += tl.sum(tl.where(weight > 0.0, weight * distance.to(tl.float64), 0.0).to(tl.int64), 0)
    return total.to(tl.float64) / WEIGHT_UNITS, spread.to(tl.float64) / WEIGHT_UNITS


@triton.jit
def probabilities(sorted_ptr, places, start, vocab, peak, total):
    """The probabilities of the tokens at some places, float32."""
    weight, _ = weights(sorted_ptr, places, start, vocab, peak)
    return tl.math.div_rn(weight, total.to(tl.float32))


@triton.jit
def top_p_start(sorted_ptr, start, vocab, peak, rest, BLOCK: tl.constexpr):
    """The first place at which the mass so far exceeds `rest`; the best token stays whatever it is."""
    total, _ = denominator(sorted_ptr, start, vocab, peak, BLOCK)
    below = tl.zeros([], tl.int64)
    num_removed = start
    for first in range(start // BLOCK * BLOCK, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        mass = (probabilities(sorted_ptr, places, start, vocab, peak, total).to(tl.float64) * MASS_UNITS).to(tl.int64)
        running = ((below + tl.cumsum(mass, 0)).to(tl.float64) / MASS_UNITS).to(tl.float32)
        num_removed += tl.sum(((running <= rest) & (places >= start) & (places < vocab)).to(tl.int32), 0)
        below += tl.sum(mass, 0)
    return tl.minimum(num_removed, vocab - 1)


@triton.jit
def eta_start(sorted_ptr, start, vocab, peak, eta, root_eta, BLOCK: tl.constexpr):
    """The first place whose probability is at least min(eta, sqrt(eta) e^-entropy) (Hewitt et al. 2022)."""
    total, spread = denominator(sorted_ptr, start, vocab, peak, BLOCK)
    entropy = tl.log(total) + spread / total
    least = tl.minimum(root_eta * tl.exp(-entropy.to(tl.float32)), eta)
    num_removed = start
    for first in range(start // BLOCK * BLOCK, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_less = probabilities(sorted_ptr, places, start, vocab, peak, total) < least
        num_removed += tl.sum((is_less & (places >= start) & (places < vocab)).to(tl.int32), 0)
    return tl.minimum(num_removed, vocab - 1)


@triton.jit
def first_kept(rows_ptr, row, sorted_ptr, vocab, best, BLOCK: tl.constexpr):
    """The place from which on a sorted row is kept: here the filters come one behind the other."""
    start = tl.zeros([], tl.int32)
    top_k, rest, eta = whole(rows_ptr, row, TOP_K_COLUMN), real(rows_ptr, row, REST), real(rows_ptr, row, ETA)
    if (top_k > 0) & (top_k < vocab):
        start = first_from(sorted_ptr, start, vocab, tl.load(sorted_ptr + vocab - top_k))
    if rest >= 0.0:
        start = top_p_start(sorted_ptr, start, vocab, best, rest, BLOCK)
    start = first_from(sorted_ptr, start, vocab, best + real(rows_ptr, row, LOG_MIN_P))
    if eta > 0.0:
        start = eta_start(sorted_ptr, start, vocab, best, eta, real(rows_ptr, row, ROOT_ETA), BLOCK)
    return start


@triton.jit
def find_cuts(
    rows_ptr, peaks_ptr, sorted_ptr, order_ptr, cut_scores_ptr, cut_tokens_ptr, vocab, num_blocks, num_rows,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The score and the token from which on each row is kept; nothing is cut off a row that no filter is asked for."""
    row = tl.program_id(0)
    score, token = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int64)
    if whole(rows_ptr, row, SLOT) >= 0:
        peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
        if is_cut(rows_ptr, row, peak):
            best = temper(peak, peak, real(rows_ptr, row, TEMPERATURE))
            scores = sorted_ptr + row.to(tl.int64) * vocab
            start = first_kept(rows_ptr, row, scores, vocab, best, BLOCK)
            score = tl.load(scores + start)
            token = tl.load(order_ptr + row.to(tl.int64) * vocab + start)
    tl.store(cut_scores_ptr + row, score)
    tl.store(cut_tokens_ptr + row, token.to(tl.int32))


# The filters in Triton without a sort of the vocabulary: over a row's best tokens, which alone are sorted.


NOTHING = tl.constexpr(-0x8000000000000000)  # in place of the rank of a token


@triton.jit
def load_keys(scores_ptr, tokens, vocab):
    """Scores as whole numbers without a sign, in the same order."""
    scores = tl.load(scores_ptr + tokens, mask=tokens < vocab, other=float("-inf"))
    return order_of(scores).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def list_best(
    rows_ptr, peaks_ptr, tempered_ptr, ranks_ptr, counts_ptr, vocab, num_blocks, num_rows,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The tokens above the score of the `MOST`-th one, all where there are no more: ranks (score, token), their number.

    So all tokens of one score are listed, or none.
    """
    row = tl.program_id(0)
    count = tl.zeros([], tl.int32)
    if whole(rows_ptr, row, SLOT) >= 0:
        peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
        if is_cut(rows_ptr, row, peak):
            scores = tempered_ptr + row.to(tl.int64) * vocab
            limit = key_at(scores, vocab, MOST, BLOCK)
            for first in range(0, vocab, BLOCK):
                tokens = first + tl.arange(0, BLOCK)
                keys = load_keys(scores, tokens, vocab)
                is_best = (tokens < vocab) & (keys > limit)
                orders = (keys ^ 0x80000000).to(tl.int32, bitcast=True)
                places = row * MOST + count + tl.cumsum(is_best.to(tl.int32), 0) - 1
                tl.store(ranks_ptr + places, (orders.to(tl.int64) << 32) | tokens, mask=is_best)
                count += tl.sum(is_best.to(tl.int32), 0)
    n = tl.arange(0, MOST)
    tl.store(ranks_ptr + row * MOST + n, tl.full([MOST], NOTHING, tl.int64), mask=n >= count)
    tl.store(counts_ptr + row, count)


@triton.jit
def key_at(scores_ptr, vocab, place, BLOCK: tl.constexpr):
    """The key of the score at a place, from 1 on, the best one first; 0 where all tokens have a place."""
    found, left = tl.full((), 0, tl.uint32), tl.full((), place, tl.int32)
    if vocab > place:
        for shift in range(24, -1, -8):
            counts = tl.zeros([256], tl.int32)
            for first in range(0, vocab, BLOCK):
                tokens = first + tl.arange(0, BLOCK)
                counts += count_bytes(load_keys(scores_ptr, tokens, vocab), tokens < vocab, found, shift)
            value, left = byte_at(counts, left)
            found |= value << shift
    return found


@triton.jit
def listed_denominator(scores, is_kept, peak):
    """Sums over listed scores as `denominator` has them over a sorted row."""
    distances = peak - tl.where(is_kept, scores, float("-inf"))
    weight = tl.exp(-distances).to(tl.float64) * WEIGHT_UNITS
    total = tl.sum(weight.to(tl.int64), 0)
    spread = tl.sum(tl.where(weight > 0.0, weight * distances.to(tl.float64), 0.0).to(tl.int64), 0)
    return total.to(tl.float64) / WEIGHT_UNITS, spread.to(tl.float64) / WEIGHT_UNITS


@triton.jit
def listed_probabilities(scores, is_kept, peak, total):
    """Probabilities of listed scores, float32, 0 where they are not kept."""
    weight = tl.exp(-(peak - tl.where(is_kept, scores, float("-inf"))))
    return tl.math.div_rn(weight, total.to(tl.float32))


@triton.jit
def mass_of_all(scores_ptr, vocab, peak, total, BLOCK: tl.constexpr):
    """Sum of the probabilities of all tokens, in whole units."""
    mass = tl.zeros([], tl.int64)
    for first in range(0, vocab, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        found = probabilities(scores_ptr, tokens, 0, vocab, peak, total)
        mass += tl.sum((found.to(tl.float64) * MASS_UNITS).to(tl.int64), 0)
    return mass


@triton.jit
def num_unlikely(scores_ptr, vocab, peak, total, least, BLOCK: tl.constexpr):
    """Count the tokens of a lower probability."""
    count = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        is_less = probabilities(scores_ptr, tokens, 0, vocab, peak, total) < least
        count += tl.sum((is_less & (tokens < vocab)).to(tl.int32), 0)
    return count


@triton.jit
def top_p_place(scores_ptr, scores, n, start, has_more, vocab, peak, rest, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """The first listed place at which the mass so far exceeds `rest`; -1 where it does so below.

    `has_more`: not all tokens that are left are listed.
    """
    is_kept = n >= start
    total, _ = listed_denominator(scores, is_kept, peak)
    if has_more:
        total, _ = denominator(scores_ptr, 0, vocab, peak, BLOCK)
    mass = (listed_probabilities(scores, is_kept, peak, total).to(tl.float64) * MASS_UNITS).to(tl.int64)
    below = tl.zeros([], tl.int64)
    if has_more:
        below = mass_of_all(scores_ptr, vocab, peak, total, BLOCK) - tl.sum(mass, 0)
    running = ((below + tl.cumsum(mass, 0)).to(tl.float64) / MASS_UNITS).to(tl.float32)
    place = tl.minimum(start + tl.sum(((running <= rest) & is_kept).to(tl.int32), 0), MOST - 1)
    is_below = has_more & ((below.to(tl.float64) / MASS_UNITS).to(tl.float32) > rest)
    return tl.where(is_below, -1, place)


@triton.jit
def eta_place(
    scores_ptr, scores, n, start, has_more, vocab, peak, eta, root_eta, BLOCK: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """The first listed place whose probability is high enough, as `eta_start` has it; -1 where one below it is."""
    is_kept = n >= start
    total, spread = listed_denominator(scores, is_kept, peak)
    if has_more:
        total, spread = denominator(scores_ptr, 0, vocab, peak, BLOCK)
    entropy = tl.log(total) + spread / total
    least = tl.minimum(root_eta * tl.exp(-entropy.to(tl.float32)), eta)
    is_less = is_kept & (listed_probabilities(scores, is_kept, peak, total) < least)
    place = start + tl.sum(is_less.to(tl.int32), 0)
    if has_more:
        place = num_unlikely(scores_ptr, vocab, peak, total, least, BLOCK) - (vocab - MOST)
    return tl.where(place < start, -1, tl.minimum(place, MOST - 1))


@triton.jit
def first_listed(
    rows_ptr, row, scores_ptr, scores, n, count, vocab, best, BLOCK: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return the first place in the list that a row keeps, through all filters in their order; -1 for one below it."""
    start, has_more = MOST - count, count < vocab
    top_k, rest, eta = whole(rows_ptr, row, TOP_K_COLUMN), real(rows_ptr, row, REST), real(rows_ptr, row, ETA)
    is_known = count > 0
    if (top_k > 0) & (top_k < vocab):
        lowest = tl.max(tl.where(n == MOST - top_k, scores, float("-inf")), 0)
        is_known = is_known & (top_k <= count)
        start += tl.sum(((n >= start) & (scores < lowest)).to(tl.int32), 0)
        has_more = count < 0
    if rest >= 0.0:
        start = top_p_place(scores_ptr, scores, n, start, has_more, vocab, best, rest, BLOCK, MOST)
        is_known = is_known & (start >= 0)
        has_more = count < 0
    floor = best + real(rows_ptr, row, LOG_MIN_P)
    num_lower = tl.sum(((n >= start) & (scores < floor)).to(tl.int32), 0)
    is_known = is_known & ((has_more == 0) | (num_lower > 0) | (floor == float("-inf")))
    start += num_lower
    has_more = has_more & (num_lower == 0)
    if eta > 0.0:
        root_eta = real(rows_ptr, row, ROOT_ETA)
        start = eta_place(scores_ptr, scores, n, start, has_more, vocab, best, eta, root_eta, BLOCK, MOST)
        is_known = is_known & (start >= 0)
        has_more = count < 0
    return tl.where(is_known & (has_more == 0), start, -1)


@triton.jit
def find_cuts_of_best(
    rows_ptr, peaks_ptr, tempered_ptr, ranks_ptr, counts_ptr, cut_scores_ptr, cut_tokens_ptr, undecided_ptr,
    vocab, num_blocks, num_rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Cuts as `find_cuts` stores them, by ranks that are sorted; and which rows are undecided."""
    row = tl.program_id(0)
    score, token = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32)
    place = tl.zeros([], tl.int32)
    if whole(rows_ptr, row, SLOT) >= 0:
        peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
        if is_cut(rows_ptr, row, peak):
            n = tl.arange(0, MOST)
            ranks = tl.load(ranks_ptr + row * MOST + n)
            scores = number_of((ranks >> 32).to(tl.int32))
            best = temper(peak, peak, real(rows_ptr, row, TEMPERATURE))
            scores_ptr, count = tempered_ptr + row.to(tl.int64) * vocab, tl.load(counts_ptr + row)
            place = first_listed(rows_ptr, row, scores_ptr, scores, n, count, vocab, best, BLOCK, MOST)
            score = tl.max(tl.where(n == place, scores, float("-inf")), 0)
            token = tl.max(tl.where(n == place, (ranks & 0x7FFFFFFF).to(tl.int32), 0), 0)
    tl.store(cut_scores_ptr + row, score)
    tl.store(cut_tokens_ptr + row, token)
    tl.store(undecided_ptr + row, place < 0)
