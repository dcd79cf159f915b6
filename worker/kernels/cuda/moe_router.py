"""Choice of experts on a GPU: logits, each row's best experts with weights, and choices sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.row_kernels import is_padding
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import Routing, Score

ROUTER_COLUMNS = 16
ROUTER_ROWS = 64
ROUTER_DEPTH = 32
PART_DEPTH = 512  # the depth is split, because one program per block of experts would be too few
TILE = 16  # the fewest rows that tensor cores support
SORTED_MARKS = 1024  # number of marks that fit in a warp's registers
MOST_SORTING_WARPS = 8
SOFTMAX, SIGMOID = tl.constexpr(int(Score.SOFTMAX)), tl.constexpr(int(Score.SIGMOID))
SOFTMAX_OF_CHOSEN = tl.constexpr(int(Score.SOFTMAX_OF_CHOSEN))
SIGMOID_OF_CHOSEN = tl.constexpr(int(Score.SIGMOID_OF_CHOSEN))
SPARSE_MIXER = tl.constexpr(int(Score.SPARSE_MIXER))


def num_parts(hidden: int) -> int:
    return -(-hidden // PART_DEPTH)


def num_tiles(num_experts: int, num_chosen: int, num_rows: int = NUM_ROWS) -> int:
    """Return the most tiles for all rows' choices; each expert has at most one partial tile."""
    num_pairs = num_rows * num_chosen
    return (num_pairs + (TILE - 1) * min(num_experts, num_pairs)) // TILE


@triton.jit
def multiply_router(
    input_ptr, router_ptr, parts_ptr,
    NUM_ROWS: tl.constexpr, DEPTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, PART_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (columns, part of the depth, rows): float32 sums of this part, blocks in order."""
    rows = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = (columns < NUM_COLUMNS)[None, :]
    first = tl.program_id(1) * PART_DEPTH
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, PART_DEPTH, BLOCK_DEPTH):
        depth = first + start + tl.arange(0, BLOCK_DEPTH)
        is_there = depth < DEPTH
        x = tl.load(input_ptr + rows[:, None] * DEPTH + depth[None, :], mask=is_there[None, :], other=0.0)
        places = columns[None, :] * DEPTH + depth[:, None]
        w = tl.load(router_ptr + places, mask=is_there[:, None] & is_column, other=0.0)
        acc = dot(x.to(tl.float32), w, acc)
    places = (tl.program_id(1) * NUM_ROWS + rows)[:, None] * NUM_COLUMNS + columns[None, :]
    tl.store(parts_ptr + places, acc, mask=is_column)


@triton.jit
def whole_max(numbers):
    return tl.max(tl.max(numbers, 1), 0)


@triton.jit
def whole_sum(numbers):
    return tl.sum(tl.sum(numbers, 1), 0)


@triton.jit
def softmax(logits, is_real):
    """Compute a whole matrix's softmax in float64, rounded once."""
    logits = tl.where(is_real, logits, float("-inf")).to(tl.float64)
    powers = tl.exp(logits - whole_max(logits))
    return (powers / whole_sum(powers)).to(tl.float32)


@triton.jit
def sigmoid(logits):
    """Compute the sigmoid in float64, rounded once."""
    return (1.0 / (1.0 + tl.exp(-logits.to(tl.float64)))).to(tl.float32)


@triton.jit
def summed_logits(
    parts_ptr, row, columns, mask, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr
):  # fmt: skip
    """Return a row's logits, with the parts summed in order."""
    places = parts_ptr + row * NUM_COLUMNS + columns
    logits = tl.load(places, mask=mask, other=0.0)
    for part in range(1, NUM_PARTS):
        logits += tl.load(places + part * NUM_ROWS * NUM_COLUMNS, mask=mask, other=0.0)
    return logits


@triton.jit
def scored(logits, is_real, SCORE: tl.constexpr):
    """Return the scores by which experts are chosen."""
    if SCORE == SOFTMAX:
        return softmax(logits, is_real)
    if SCORE == SIGMOID:
        return sigmoid(logits)
    return logits


@triton.jit
def weighed(
    scores, ranks, NUM_CHOSEN: tl.constexpr, SCORE: tl.constexpr, IS_NORMALISED: tl.constexpr,
    LEAST_SUM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the weights `[1, ranks]` of chosen experts, summed in the order of ranks."""
    if SCORE == SOFTMAX_OF_CHOSEN:
        scores = softmax(scores, ranks < NUM_CHOSEN)
    if SCORE == SIGMOID_OF_CHOSEN:
        scores = sigmoid(scores)
    if IS_NORMALISED:
        total = 0.0
        for rank in range(NUM_CHOSEN):
            total += whole_sum(tl.where(ranks == rank, scores, 0.0))
        total = tl.where(total < LEAST_SUM, LEAST_SUM, total)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + total)
    return scores * SCALE


@triton.jit
def sparse_share(logits, is_left, most, JITTER: tl.constexpr):
    """Return the softmax share of the expert with logit `most` among remaining experts within twice the jitter."""
    size = tl.abs(logits)
    is_far = tl.div_rn(most - logits, tl.where(size < most, most, size)) > 2 * JITTER
    powers = tl.exp(logits.to(tl.float64) - most.to(tl.float64))
    return (1.0 / whole_sum(tl.where(is_left & ~is_far, powers, 0.0))).to(tl.float32)


@triton.jit
def share_of(logit, ROUNDS: tl.constexpr):
    return rounded(sigmoid(rounded(logit, tl.bfloat16)), tl.bfloat16) if ROUNDS else sigmoid(logit)


@triton.jit
def open_groups(
    scores, is_real, members, GROUP_WIDTH: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr
):  # fmt: skip
    """Return a mask `[groups, members]` of the experts in the best groups; ties go to the lower group."""
    group_count: tl.constexpr = scores.shape[0]
    groups = tl.arange(0, group_count)
    scores = tl.where(is_real, scores, float("-inf"))
    best = tl.max(scores, 1)
    most = best
    for _ in tl.static_range(1, min(NUM_BEST, GROUP_WIDTH)):
        place = tl.min(tl.where(scores == most[:, None], members, GROUP_WIDTH), 1)
        scores = tl.where(members == place[:, None], float("-inf"), scores)
        most = tl.max(scores, 1)
        best += most
    is_group = tl.max(is_real.to(tl.int32), 1) > 0
    is_left = is_group
    for _ in range(NUM_CHOSEN_GROUPS):
        greatest = tl.max(tl.where(is_left, best, float("-inf")), 0)
        is_left &= groups != tl.min(tl.where(is_left & (best == greatest), groups, group_count), 0)
    return is_real & (is_group & ~is_left)[:, None]


@triton.jit
def take_best(scores, is_left, experts, LAST: tl.constexpr):
    """Return the best remaining expert; ties go to the lower index."""
    most = whole_max(tl.where(is_left, scores, float("-inf")))
    return tl.min(tl.min(tl.where(is_left & (scores == most), experts, LAST), 1), 0)


@triton.jit
def scaled_choices(weights, choice_scales_ptr, experts, marks, ranks, NUM_CHOSEN: tl.constexpr):
    """Return weights `[1, ranks]` times the scales of their experts, if these have some."""
    if choice_scales_ptr is not None:
        scales = tl.load(choice_scales_ptr + experts, mask=marks > 0, other=0.0)
        for rank in range(NUM_CHOSEN):
            scale = whole_sum(tl.where(marks == rank + 1, scales, 0.0))
            weights = tl.where(ranks == rank, weights * scale, weights)
    return weights


@triton.jit
def choose_row(
    rows_ptr, parts_ptr, router_bias_ptr, choice_bias_ptr, choice_scales_ptr, marks_ptr, choice_weights_ptr,
    shares_ptr,
    NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, RANKS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, SCORE: tl.constexpr,
    IS_NORMALISED: tl.constexpr, LEAST_SUM: tl.constexpr, SCALE: tl.constexpr, ROUNDS_LOGITS: tl.constexpr,
    ROUNDS_WEIGHTS: tl.constexpr, ROUNDS_SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr,
    JITTER: tl.constexpr,
):  # fmt: skip
    """Program (row): stores marks of all experts (0, or rank plus 1), and weights by rank.

    The column after all experts determines the weight of the shared expert.
    """
    row = tl.program_id(0)
    group_width: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups, members = tl.arange(0, GROUPS)[:, None], tl.arange(0, MEMBERS)[None, :]
    experts = groups * group_width + members
    is_real = (groups < NUM_GROUPS) & (members < group_width)
    marks = tl.zeros([GROUPS, MEMBERS], tl.int32)
    marks_ptr += row * NUM_EXPERTS + experts
    if is_padding(rows_ptr, row):
        tl.store(marks_ptr, marks, mask=is_real)
        return
    logits = summed_logits(parts_ptr, row, experts, is_real, NUM_ROWS, NUM_COLUMNS, NUM_PARTS)
    if HAS_BIAS:
        logits += tl.load(router_bias_ptr + experts, mask=is_real, other=0.0)
    if ROUNDS_LOGITS:
        logits = rounded(logits, tl.bfloat16)
    scores = scored(logits, is_real, SCORE)
    shifted = scores
    if HAS_CHOICE_BIAS:
        shifted += tl.load(choice_bias_ptr + experts, mask=is_real, other=0.0)
    shifted = tl.where(shifted == shifted, shifted, float("-inf"))
    is_left = is_real
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        is_left = open_groups(shifted, is_real, members, group_width, NUM_CHOSEN_GROUPS, NUM_BEST)

    ranks = tl.arange(0, RANKS)[None, :]
    weights = tl.zeros([1, RANKS], tl.float32)
    for rank in range(NUM_CHOSEN):
        is_best = is_real & (experts == take_best(shifted, is_left, experts, NUM_EXPERTS))
        weight = whole_sum(tl.where(is_best, scores, 0.0))
        if SCORE == SPARSE_MIXER:
            weight = sparse_share(logits, is_left, weight, JITTER)
        weights = tl.where(ranks == rank, weight, weights)
        marks = tl.where(is_best, rank + 1, marks)
        is_left &= ~is_best
    weights = weighed(weights, ranks, NUM_CHOSEN, SCORE, IS_NORMALISED, LEAST_SUM, SCALE)
    weights = scaled_choices(weights, choice_scales_ptr, experts, marks, ranks, NUM_CHOSEN)
    if ROUNDS_WEIGHTS:
        weights = rounded(weights, tl.bfloat16)
    is_damaged = whole_max((logits != logits).to(tl.int32)) > 0  # comparisons skip NaN, but results must show it
    weights = tl.where(is_damaged, float("nan"), weights)
    tl.store(marks_ptr, marks, mask=is_real)
    tl.store(choice_weights_ptr + row * NUM_CHOSEN + ranks, weights, mask=ranks < NUM_CHOSEN)
    if NUM_COLUMNS > NUM_EXPERTS:
        share = summed_logits(parts_ptr, row, NUM_EXPERTS, True, NUM_ROWS, NUM_COLUMNS, NUM_PARTS)
        tl.store(shares_ptr + row, share_of(share, ROUNDS_SHARES))


@triton.jit
def sort_choices(
    rows_ptr, marks_ptr, tile_experts_ptr, tile_pairs_ptr, met_ptr,
    NUM_ROWS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_TILES: tl.constexpr,
    ALL_TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Single program: stores each tile's expert and its pairs (row * `NUM_CHOSEN` + rank) in order, or -1.

    `met [NUM_ROWS + 1, 2]`, indexed by the number of rows without padding, counts layers and used experts.
    """
    rows = tl.arange(0, NUM_ROWS)[:, None]
    num_tiles, num_met = 0, 0
    for first in range(0, NUM_EXPERTS, BLOCK):
        experts = first + tl.arange(0, BLOCK)
        is_expert = (experts < NUM_EXPERTS)[None, :]
        marks = tl.load(marks_ptr + rows * NUM_EXPERTS + experts[None, :], mask=is_expert, other=0)
        is_chosen = (marks > 0).to(tl.int32)
        places = tl.cumsum(is_chosen, 0) - is_chosen
        counts = tl.sum(is_chosen, 0)
        tiles = (counts + TILE - 1) // TILE
        starts = num_tiles + tl.cumsum(tiles, 0) - tiles
        tl.store(tile_pairs_ptr + starts[None, :] * TILE + places, rows * NUM_CHOSEN + marks - 1, mask=marks > 0)
        for number in range(NUM_ROWS // TILE):  # a row chooses an expert at most once
            tl.store(tile_experts_ptr + starts + number, experts, mask=number < tiles)
        for place in range(TILE):
            free = counts + place
            tl.store(tile_pairs_ptr + starts * TILE + free, tl.zeros([BLOCK], tl.int32) - 1, mask=free < tiles * TILE)
        num_tiles += tl.sum(tiles, 0)
        num_met += tl.sum((counts > 0).to(tl.int32), 0)
    numbers = tl.arange(0, ALL_TILES)
    is_empty = (numbers >= num_tiles) & (numbers < NUM_TILES)
    tl.store(tile_experts_ptr + numbers, tl.zeros([ALL_TILES], tl.int32) - 1, mask=is_empty)
    num_real = tl.sum((tl.load(rows_ptr + tl.arange(0, NUM_ROWS) * 5 + 2) > 0).to(tl.int32), 0)
    met_ptr += num_real * 2
    tl.store(met_ptr, tl.load(met_ptr) + 1)
    tl.store(met_ptr + 1, tl.load(met_ptr + 1) + num_met)


def router_constants(hidden: int, num_columns: int, num_rows: int = NUM_ROWS) -> dict[str, int]:
    """Return constants, warps and stages of `multiply_router`."""
    return {
        "NUM_ROWS": num_rows,
        "DEPTH": hidden,
        "NUM_COLUMNS": num_columns,
        "PART_DEPTH": PART_DEPTH,
        "TILE_ROWS": ROUTER_ROWS,
        "TILE_COLUMNS": ROUTER_COLUMNS,
        "BLOCK_DEPTH": ROUTER_DEPTH,
        "num_warps": 4,
        "num_stages": 3,
    }


def choice_constants(
    routing: Routing,
    hidden: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_choice_bias: bool,
    has_share: bool,
    num_rows: int = NUM_ROWS,
) -> dict[str, Any]:
    """Return constants and warps of `choose_row`; nothing is rounded in float32."""
    rounds = dtype == torch.bfloat16
    return {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": routing.num_experts + has_share,
        "NUM_PARTS": num_parts(hidden),
        "NUM_EXPERTS": routing.num_experts,
        "NUM_CHOSEN": routing.num_chosen,
        "RANKS": triton.next_power_of_2(routing.num_chosen),
        "NUM_GROUPS": routing.num_groups,
        "NUM_CHOSEN_GROUPS": routing.num_chosen_groups,
        "NUM_BEST": routing.num_best_of_group,
        "GROUPS": triton.next_power_of_2(routing.num_groups),
        "MEMBERS": triton.next_power_of_2(routing.num_experts // routing.num_groups),
        "SCORE": int(routing.score),
        "IS_NORMALISED": routing.is_normalised,
        "LEAST_SUM": routing.least_sum,
        "SCALE": routing.scale,
        "ROUNDS_LOGITS": rounds and routing.rounds_logits,
        "ROUNDS_WEIGHTS": rounds and routing.rounds_weights,
        "ROUNDS_SHARES": rounds,
        "HAS_BIAS": has_bias,
        "HAS_CHOICE_BIAS": has_choice_bias,
        "JITTER": routing.jitter,
        "num_warps": 1 if routing.num_experts <= 256 else 4,
    }


def sort_constants(routing: Routing, num_rows: int = NUM_ROWS) -> dict[str, int]:
    """Return constants and warps of `sort_choices`."""
    count = num_tiles(routing.num_experts, routing.num_chosen, num_rows)
    num_warps = min(MOST_SORTING_WARPS, num_rows // TILE)
    return {
        "NUM_ROWS": num_rows,
        "NUM_EXPERTS": routing.num_experts,
        "NUM_CHOSEN": routing.num_chosen,
        "NUM_TILES": count,
        "ALL_TILES": triton.next_power_of_2(count),
        "TILE": TILE,
        "BLOCK": num_warps * SORTED_MARKS // num_rows,
        "num_warps": num_warps,
    }
