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
from swiftbatch.worker.kernels.cuda import kv_kernels as row_means
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
from swiftbatch.worker.sampling.cuda import logits_kernels as scores
from swiftbatch.worker.sampling.cuda import top_candidates as choice
from swiftbatch.worker.sampling.cuda import top_candidates as ranking
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


def every_launch() -> list[Launch]:
    """Heads have 128 numbers."""
    block, top, likeliest = {"BLOCK": sampling_rows.BLOCK}, {"TOP": TOP_K}, {"TOP": MAX_TOP_LOGPROBS}
    ranked = {"TOP": 16}  # candidates of a draft model's row
    width = {"WIDTH": 128}  # a head's, and 128,256 tokens in blocks
    searched = width | {"BLOCK": filter_kernels.SEARCH_BLOCK}
    top_k, top_p, eta = ({"FILTER": number} for number in range(3))
    moved = width | {"HEAD_DIM": 128}
    gathered = moved | {"NUM_ROWS": kv_kernels.NUM_ROWS, "IS_CODED": False, "PAGE": GPU_PAGE}
    averaged = moved | {"CHUNK_WIDTH": CHUNK_SIZE, "PAGE": GPU_PAGE}
    return [
        Launch(scores.penalise_blocks, TYPES, block, cuda_sampler.NUM_WARPS),
        Launch(choice.bounds_of_blocks, TYPES, block | width | {"cuts_ptr": None}, cuda_sampler.NUM_WARPS),
        Launch(choice.bounds_of_blocks, TYPES, block | width, cuda_sampler.NUM_WARPS),
        Launch(choice.best_of_rows, TYPES, block | width | {"cuts_ptr": None}, choice.ROW_WARPS),
        Launch(choice.best_of_rows, TYPES, block | width, choice.ROW_WARPS),
        Launch(filter_kernels.temper_blocks, TYPES, block | width, filter_kernels.NUM_WARPS),
        *(
            Launch(filter_kernels.sum_weights, SUMMING, searched | each, filter_kernels.NUM_WARPS)
            for each in (top_p, eta)
        ),
        Launch(filter_kernels.sum_bytes, SUMMING, searched | top_k | {"NUMBER": 3}, filter_kernels.NUM_WARPS),
        *(
            Launch(filter_kernels.sum_bytes, SUMMING, searched | top_p | {"NUMBER": number}, filter_kernels.NUM_WARPS)
            for number in (0, 6)
        ),
        Launch(filter_kernels.find_lowest, SUMMING, searched, filter_kernels.NUM_WARPS),
        *(
            Launch(filter_kernels.settle_cuts, SUMMING, width | {"FILTER": number, "NUM_BYTES": num_bytes})
            for number, num_bytes in enumerate((4, 7, 0))
        ),
        Launch(top_candidates.candidates_of_blocks, TYPES, block | top, top_candidates.BLOCK_WARPS),
        Launch(top_candidates.candidates_of_rows, TYPES, width | top | UNLIKELY_LOGPROB, top_candidates.ROW_WARPS),
        Launch(logprob_kernels.logprobs_of_blocks, IN_FLOAT64, block | width | likeliest, logprob_kernels.NUM_WARPS),
        Launch(
            logprob_kernels.logprobs_of_rows,
            IN_FLOAT64,
            width | likeliest | {"NO_TOKEN": NO_TOKEN, "NUM_RANKS": 4096},
            logprob_kernels.ROW_WARPS,
        ),
        Launch(ranking.rank_blocks, TYPES, block | width | ranked | {"SPREAD": 0.4}, ranking.NUM_WARPS),
        Launch(top_candidates.candidates_of_rows, TYPES, width | ranked | UNLIKELY_LOGPROB, ranking.ROW_WARPS),
        Launch(logits_kernels.count_tokens, TYPES, {"BLOCK": logits_kernels.BLOCK}, logits_kernels.NUM_WARPS),
        Launch(kv_kernels.move_slot_rows, MOVING_TYPES, moved, kv_kernels.MOVE_WARPS),
        Launch(kv_kernels.move_slot_rows, MOVING_TYPES | WIDE, moved, kv_kernels.MOVE_WARPS),
        Launch(kv_kernels.copy_rows, MOVING_TYPES, gathered | {"IS_CHOSEN": True}, kv_kernels.COPY_WARPS),
        Launch(
            kv_kernels.copy_rows,
            MOVING_TYPES,
            gathered | {"IS_CHOSEN": False, "entries_ptr": None, "PAGE": 0},
            kv_kernels.COPY_WARPS,
        ),
        Launch(kv_kernels.copy_rows, MOVING_TYPES | WIDE, gathered | {"IS_CHOSEN": True}, kv_kernels.COPY_WARPS),
        Launch(
            row_means.average_chunk, MOVING_TYPES | {"source_ptr": BF16, "out_ptr": BF16}, averaged, row_means.NUM_WARPS
        ),
        Launch(
            row_means.average_chunk,
            MOVING_TYPES | {"source_ptr": FLOATS, "out_ptr": FLOATS},
            averaged,
            row_means.NUM_WARPS,
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
