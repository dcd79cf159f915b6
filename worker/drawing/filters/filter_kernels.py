"""The filters in Triton, in the order of filter_list.py, over rows that are sorted: each moves a row's first kept place
up. What is left is everything from one token on, in the order (score, token).

All sums of a row are of whole numbers: their order changes no bit, whichever layout the compiler gives a block, and no
other row is in them (torch.cumsum on CUDA has an order that changes as it runs).
"""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda.parameters import SLOT, TEMPERATURE, real, whole
from swiftbatch.worker.drawing.cuda.row_words import column_of
from swiftbatch.worker.drawing.cuda.scores import row_peak, temper

TOP_K = tl.constexpr(column_of("top_k"))
REST = tl.constexpr(column_of("rest"))
LOG_MIN_P = tl.constexpr(column_of("log_min_p"))
ETA = tl.constexpr(column_of("eta"))
ROOT_ETA = tl.constexpr(column_of("root_eta"))
WEIGHT_UNITS = tl.constexpr(2.0**44)  # of a weight e^(score - peak): as many as MAX_VOCAB of them stay below 2^63
MASS_UNITS = tl.constexpr(2.0**60)  # of a probability: 1 and its rounding stay below 2^63


@triton.jit
def has_filters(rows_ptr, row):
    """Return whether anything but min-p cuts the row."""
    cuts = (whole(rows_ptr, row, TOP_K) > 0) | (real(rows_ptr, row, REST) >= 0.0)
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
    top_k, rest, eta = whole(rows_ptr, row, TOP_K), real(rows_ptr, row, REST), real(rows_ptr, row, ETA)
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
