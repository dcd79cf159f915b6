"""The drawing and moving kernels as launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swiftbatch.jobs.logprobs import NO_TOKEN
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS
from swiftbatch.worker.kernels.cuda import kv_kernels
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE
from swiftbatch.worker.kv.sparse_cache import CHUNK_SIZE
from swiftbatch.worker.sampling.batch_sampler import UNLIKELY
from swiftbatch.worker.sampling.cuda import (
    cuda_sampler,
    filter_kernels,
    logits_kernels,
    logprob_kernels,
    sampling_rows,
    top_candidates,
)
from swiftbatch.worker.sampling.draft_tree import TOP_K

MULTIPLES = ("vocab", "logits_stride", "stride_")  # multiples of 16 in large models
MOST_SHARED = 48 * 1024  # bytes that every GPU gives a program
FLOATS, BF16, INTS, LONGS = "*fp32", "*bf16", "*i32", "*i64"
TYPES = {
    "rows_ptr": INTS,
    "logits_ptr": FLOATS,
    "counts_ptr": INTS,
    "ancestors_ptr": INTS,
    "leaving_ptr": INTS,
    "output_ptr": INTS,
    "bias_ptr": FLOATS,
    "allowed_ptr": INTS,
    "masked_ptr": INTS,
    "scores_ptr": FLOATS,
    "peaks_ptr": INTS,
    "tops_ptr": INTS,
    "tempered_ptr": FLOATS,
    "cuts_ptr": LONGS,
    "bounds_ptr": LONGS,
    "tokens_ptr": INTS,
    "highest_ptr": FLOATS,
    "ranks_ptr": LONGS,
    "sums_ptr": FLOATS,
    "ids_ptr": INTS,
    "logprobs_ptr": FLOATS,
    "arriving_ptr": INTS,
}
IN_FLOAT64 = TYPES | {"masses_ptr": "*fp64", "numbers_ptr": INTS}
SUMMING = TYPES | {"sums_ptr": LONGS}
UNLIKELY_LOGPROB = {"UNLIKELY": UNLIKELY}
MOVING_TYPES = {"arena_ptr": "*i16", "source_ptr": "*i16", "out_ptr": "*i16"} | dict.fromkeys(
    ("moves_ptr", "entries_ptr", "pages_ptr"), INTS
)
WIDE = {"arena_ptr": INTS, "source_ptr": INTS, "out_ptr": INTS}  # of float32


@dataclass(frozen=True)
class Launch:
    """Pointer types (all else is int32), constants and warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4


WIDTH = {"WIDTH": 128}  # a head's, and 128,256 tokens in blocks
BLOCKS = {"BLOCK": sampling_rows.BLOCK}


def every_launch() -> list[Launch]:
    return [*choice_launches(), *filter_launches(), *candidate_launches(), *moving_launches()]


def choice_launches() -> list[Launch]:
    of_blocks, unfiltered = BLOCKS | WIDTH, {"cuts_ptr": None}
    return [
        Launch(logits_kernels.penalise_blocks, TYPES, BLOCKS, cuda_sampler.NUM_WARPS),
        Launch(top_candidates.bounds_of_blocks, TYPES, of_blocks | unfiltered, cuda_sampler.NUM_WARPS),
        Launch(top_candidates.bounds_of_blocks, TYPES, of_blocks, cuda_sampler.NUM_WARPS),
        Launch(top_candidates.best_of_rows, TYPES, of_blocks | unfiltered, top_candidates.ROW_WARPS),
        Launch(top_candidates.best_of_rows, TYPES, of_blocks, top_candidates.ROW_WARPS),
        Launch(logits_kernels.count_tokens, TYPES, {"BLOCK": logits_kernels.BLOCK}, logits_kernels.NUM_WARPS),
    ]


def filter_launches() -> list[Launch]:
    searched = WIDTH | {"BLOCK": filter_kernels.SEARCH_BLOCK}
    top_k, top_p, eta = ({"FILTER": number} for number in range(3))
    bytes_of = (top_k | {"NUMBER": 3}, top_p | {"NUMBER": 0}, top_p | {"NUMBER": 6})
    in_words = (
        *((filter_kernels.sum_weights, searched | each) for each in (top_p, eta)),
        *((filter_kernels.sum_bytes, searched | each) for each in bytes_of),
        (filter_kernels.find_lowest, searched),
    )
    return [
        Launch(filter_kernels.temper_blocks, TYPES, BLOCKS | WIDTH, filter_kernels.NUM_WARPS),
        *(Launch(kernel, SUMMING, constants, filter_kernels.NUM_WARPS) for kernel, constants in in_words),
        *(
            Launch(filter_kernels.settle_cuts, SUMMING, WIDTH | each | {"NUM_BYTES": num_bytes})
            for each, num_bytes in ((top_k, 4), (top_p, 7), (eta, 0))
        ),
    ]


def candidate_launches() -> list[Launch]:
    top, likeliest, ranked = ({"TOP": number} for number in (TOP_K, MAX_TOP_LOGPROBS, 16))
    of_rows = WIDTH | likeliest | {"NO_TOKEN": NO_TOKEN, "NUM_RANKS": 4096}
    of_blocks = BLOCKS | WIDTH
    return [
        Launch(top_candidates.candidates_of_blocks, TYPES, BLOCKS | top, top_candidates.BLOCK_WARPS),
        *(
            Launch(top_candidates.candidates_of_rows, TYPES, WIDTH | each | UNLIKELY_LOGPROB, top_candidates.ROW_WARPS)
            for each in (top, ranked)
        ),
        Launch(top_candidates.rank_blocks, TYPES, of_blocks | ranked | {"SPREAD": 0.4}, top_candidates.NUM_WARPS),
        Launch(logprob_kernels.logprobs_of_blocks, IN_FLOAT64, of_blocks | likeliest, logprob_kernels.NUM_WARPS),
        Launch(logprob_kernels.logprobs_of_rows, IN_FLOAT64, of_rows, logprob_kernels.ROW_WARPS),
    ]


def moving_launches() -> list[Launch]:
    """Heads have 128 numbers."""
    moved = WIDTH | {"HEAD_DIM": 128}
    gathered = moved | {"NUM_ROWS": kv_kernels.NUM_ROWS, "IS_CODED": False, "PAGE": GPU_PAGE}
    chosen, in_order = gathered | {"IS_CHOSEN": True}, gathered | {"IS_CHOSEN": False, "entries_ptr": None, "PAGE": 0}
    averaged = moved | {"CHUNK_WIDTH": CHUNK_SIZE, "PAGE": GPU_PAGE}
    return [
        *(
            Launch(kv_kernels.move_slot_rows, types, moved, kv_kernels.MOVE_WARPS)
            for types in (MOVING_TYPES, MOVING_TYPES | WIDE)
        ),
        *(
            Launch(kv_kernels.copy_rows, types, constants, kv_kernels.COPY_WARPS)
            for types, constants in ((MOVING_TYPES, chosen), (MOVING_TYPES, in_order), (MOVING_TYPES | WIDE, chosen))
        ),
        *(
            Launch(
                kv_kernels.average_chunk,
                MOVING_TYPES | {"source_ptr": kind, "out_ptr": kind},
                averaged,
                kv_kernels.NUM_WARPS,
            )
            for kind in (BF16, FLOATS)
        ),
    ]


def drawing_launches() -> dict[str, Launch]:
    """Number a kernel's forms if there are several."""
    found: dict[str, Launch] = {}
    for launch in every_launch():
        forms = sum(each.kernel is launch.kernel for each in found.values())
        found[launch.kernel.__name__ + (f", form {forms + 1}" if forms else "")] = launch
    return found


def compiled(launch: Launch, capability: int) -> Any:
    """Addresses are multiples of 16, as torch allocates."""
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in launch.constants else launch.types.get(name, "i32") for name in names}
    aligned = {i: signature[name].startswith("*") or name.startswith(MULTIPLES) for i, name in enumerate(names)}
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, is_multiple in aligned.items() if is_multiple},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.num_warps})
