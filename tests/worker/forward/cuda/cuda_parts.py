"""A GPU target on a CPU: interpreted kernels, checked graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from swiftbatch.jobs.run.run_records import AttentionName, KVDtype, LinearName
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import cuda_cache_shape
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_weights, with_adapters
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize, WindowPages, pages_of
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.lora import LoraFiles
from swiftbatch.worker.model.lora_weights import adapter_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence as TokenSequence
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.kernels.kernel_parts import path_to, random_tree
from tests.worker.kv.memory.test_packed_sizes import loaded_bytes
from tests.worker.kv.window_parts import spoil_free_pages
from tests.worker.model.formats.examples import Example
from tests.worker.model.formats.twins import make_twins
from tests.worker.model.test_kinds_engines import decode

CPU = torch.device("cpu")
PAGE = 64  # positions


def leave_unwritten(rows: torch.Tensor) -> None:
    """Fill rows with NaN; in codes ones give NaN scales."""
    if rows.is_floating_point():
        rows.fill_(torch.nan)
    else:
        rows.view(torch.int8).fill_(-1)


def arena_of(
    shape: CacheShape,
    num_slots: int,
    longest_job: int,
    attention: AttentionName,
    num_pages: int | None,
    windows: WindowPages | None = None,
) -> KVArena:
    """Make shuffled pages, as small as attention takes, so that jobs have several."""
    page = GPU_PAGE if attention == "flash" else PAGE
    num_pages = num_pages or num_slots * pages_of(longest_job + page, page)
    if windows is not None:
        return window_arena_of(shape, num_slots, longest_job, num_pages, windows)
    arena = KVArena(shape, num_slots, longest_job, PoolSize(num_pages, page))
    if arena.states is not None:
        leave_unwritten(arena.states.states)
        leave_unwritten(arena.states.steps)
    random.Random(num_pages).shuffle(arena.pool._free)
    return arena


def window_arena_of(
    shape: CacheShape, num_slots: int, longest_job: int, num_pages: int, windows: WindowPages
) -> KVArena:
    """Window layers have their own pool, whose free pages are full of NaN."""
    arena = KVArena(shape, num_slots, longest_job, PoolSize(num_pages, PAGE, windows))
    spoil_free_pages(arena)
    for pool in (arena.pool, arena.windowed.pool):
        random.Random(num_pages).shuffle(pool._free)
    return arena


def cuda_target(
    files: ModelFiles,
    dtype: torch.dtype,
    num_slots: int = 2,
    longest_job: int = 200,
    linear: LinearName = "triton",
    attention: AttentionName = "triton",
    kv_dtype: KVDtype | None = None,
    num_pages: int | None = None,
    num_rows: int = NUM_ROWS,
    windows: WindowPages | None = None,
    loras: Sequence[LoraFiles] = (),
) -> TargetModel:
    """Unwritten caches are NaN; `num_pages` None means as many as all slots may have."""
    weights = dense_weights(files, dtype)
    assert weights is not None
    shape = cuda_cache_shape(weights, CPU, kv_dtype, windows is not None)
    arena = arena_of(shape, num_slots, longest_job, attention, num_pages, windows)
    leave_unwritten(arena.buffer)
    adapters = [adapter_weights(each, read_config(files.name, files.path)) for each in loras]
    stacked = with_adapters(stacked_weights(weights, CPU), adapters)
    kernels = CudaKernels(attention, linear, num_rows)
    forwards = CudaForwards(stacked, arena, frozenset(), kernels, capture=CheckedGraph)
    target = TargetModel(forwards, files)
    target._adapters = {each.name: number for number, each in enumerate(loras, 1)}
    return target


def check_rows_of_two_trees(target: TargetModel, num_nodes: int, *texts: list[int]) -> None:
    forwards, numbers = target.forwards, random.Random(4)
    caches = [forwards.arena.new_cache(100) for _ in range(2)]  # type: ignore[union-attr]
    for cache in caches:
        for text in texts:
            forwards.read(cache, text)
    length = caches[1].length
    trees = [random_tree(numbers, num_nodes, length, 64) for _ in caches]
    _, logits = forwards.run([tree_rows(*each) for each in zip(caches, (5, 6), trees, strict=True)])
    logits = logits.clone()
    for node in range(len(trees[0].parents)):
        for token_id in (5, *(trees[0].token_ids[each] for each in path_to(trees[0], node))):
            _, alone = forwards.run([tree_rows(caches[1], token_id, DraftTree())])
            caches[1].advance(1)
        assert torch.equal(alone[0], logits[1 + node])
        caches[1].roll_back(length)


def check_drafts_beside_a_resumed_job(target: TargetModel, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, seed=3, ignore_eos=True)

    def sequences() -> list[TokenSequence]:
        return [TokenSequence(f"s{each}", [each, 5, 7, 5], params, target.vocab_size) for each in (3, 4)]

    plain = [decode(target, "autoregressive", [text])[0] for text in sequences()]
    fresh, resumed = sequences()
    resumed.extend(plain[1][:2])
    assert decode(target, "token-recycling", [fresh, resumed]) == plain


def check_attention_plan(target: TargetModel, choosing: str) -> Any:
    """Compare a plan with the buffers of attention and of the layers' part that chooses keys; return the decoder."""
    decoder: Any = target.forwards._decoder  # type: ignore[attr-defined]
    sizes, scratch = read_sizes(target.files, str(target.dtype).removeprefix("torch.")), decoder.attention.scratch
    assert sizes is not None
    numbers = [each for each in vars(getattr(decoder._layers, choosing)).values() if isinstance(each, torch.Tensor)]
    taken = sum(each.nbytes for each in (*numbers, scratch.output, scratch.lse))
    assert taken == GPUMemory(0).attention_bytes(sizes, decoder.layout.capacity).once
    return decoder


def packed_and_dense(
    example: Example, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[ModelFiles, StackedWeights]]:
    """Yield a packed model and its dequantized twin, whose weights in bf16 take what the plan counts."""
    for each in make_twins(example, folder, config, tensors):
        files = locate_model(str(each))
        weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
        assert weights is not None
        assert sizes is not None
        stacked = stacked_weights(weights, CPU)
        assert sizes.weight_bytes == loaded_bytes(stacked)
        yield files, stacked
