"""Small Triton functions that kernels share: dot products, rounding, and meetings of GPUs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.rank_shares import Rank

# The interpreter has no dot of bfloat16, and truncates where a GPU rounds to nearest even.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """Return `acc + a @ b` in float32, where the product of two bfloat16 numbers is exact."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to the dtype, half to even; return float32."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def in_one_place(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the same numbers summed over an axis of size 1, behind which Triton does not look for layouts."""
    return tl.sum(numbers.reshape([1, ROWS, COLUMNS]), 0)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Round float32 to the dtype, and return that dtype."""
    if INTERPRETED:
        x = rounded(x, dtype)
    return x.to(dtype)


# Meetings of GPUs that compute a forward together: see `peers.py`.


MOST_POLLS = 1 << 26  # of a meeting, about a minute; then a GPU is lost, and the worker must end


def launch_meeting(flags: Tensor, distances: Tensor, rank: Rank) -> None:
    """Meet the other GPUs; see `Meeting`."""
    meet[(1,)](flags, distances, **meeting_constants(rank))


def meeting_constants(rank: Rank) -> dict[str, int]:
    return {"RANK": rank.number, "NUM_RANKS": rank.num_ranks, "MOST_POLLS": MOST_POLLS, "num_warps": 1}


@triton.jit
def meet(
    flags_ptr, peers_ptr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MOST_POLLS: tl.constexpr
):  # fmt: skip
    """Single program: tells all GPUs the number of the meeting, and waits until all have told it."""
    number = tl.load(flags_ptr + NUM_RANKS) + 1
    tl.store(flags_ptr + NUM_RANKS, number)
    for rank in tl.static_range(NUM_RANKS):
        tl.atomic_xchg(flags_ptr + tl.load(peers_ptr + rank) + RANK, number, sem="release", scope="sys")
    polls = 0
    for rank in tl.static_range(NUM_RANKS):
        while (tl.atomic_add(flags_ptr + rank, 0, sem="acquire", scope="sys") - number < 0) & (polls < MOST_POLLS):
            polls += 1
    if polls >= MOST_POLLS:
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [number], tl.int32, is_pure=False, pack=1)
