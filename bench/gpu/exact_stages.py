"""Stages that compare bits: the checks of `doctor`, pages in any order, and keys and values in 8 bits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence

from bench.gpu.trial import Trial, Try
from swiftbatch.jobs.run.compute_options import KVDtype
from swiftbatch.worker.exactness.batch_invariance import MAX_LENGTH, NUM_CACHES, probe_rows
from swiftbatch.worker.exactness.gpu_doctor.attention_check import OneLayer
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import ROOM, work_digest
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import CHECKS
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES
from swiftbatch.worker.kernels.kv_quantization import CODES, coded, numbers_of
from swiftbatch.worker.kv.gpu_memory_plan import most_of_a_job
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize
from swiftbatch.worker.kv.paged_arena import KVArena, PagedArena
from swiftbatch.worker.sampling.draft_tree import DraftTree

NUM_ATTENDED = 8  # rows of two slots
SMALL_PAGE = 64  # positions


def products(trial: Trial) -> Iterator[Try]:
    """Versions, the memory's speed, products in all places."""
    return _checks(trial.parts(), "machine", "products")


def rows(trial: Trial) -> Iterator[Try]:
    """Trees against plain decoding, graphs against launches, our forward against transformers'."""
    return _checks(trial.parts(), "rows", "replay", "transformers")


def attention(trial: Trial) -> Iterator[Try]:
    """Attention at all lengths and its speed, and the noise."""
    return _checks(trial.parts(), "attention", "attention speed", "noise")


def packed(trial: Trial) -> Iterator[Try]:
    """Random codes of all kinds in the model's shapes."""
    return _checks(trial.parts(dtype="bfloat16"), "packed products")


def second_process(trial: Trial) -> Iterator[Try]:
    """The same work in another process."""
    return _checks(trial.parts(), "second process")


def flash(trial: Trial) -> Iterator[Try]:
    """The checks that flash-attn has a part in, where it is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        yield "flash-attn", lambda: untried("flash-attn is not installed")
        return
    parts = trial.parts(CudaKernels(attention="flash"), dtype="bfloat16")
    yield from _checks(parts, "attention", "attention speed", "rows", "replay")


def untried(why: str) -> Finding:
    """A finding about what this machine does not have."""
    return Finding(passed=True, words=f"not tried: {why}", rows=[], unproved=why)


def _checks(parts: Parts, *names: str) -> Iterator[Try]:
    """Yield the checks of `doctor` with these names; unlike there, one that fails ends nothing."""
    for check in CHECKS:
        if check.name in names:
            yield check.name, functools.partial(check.run, parts)
            parts.forget_unused()


def pages(trial: Trial) -> Iterator[Try]:
    """The same work over slots, pages in order, pages in any order, and small ones; then pages that two jobs have."""
    parts, lengths = trial.parts(), trial.sizes.shuffled_lengths
    yield "pages in any order", functools.partial(_any_order, parts, lengths)
    yield "pages of two jobs", functools.partial(_shared, parts, max(lengths))


def _any_order(parts: Parts, lengths: Sequence[int]) -> Finding:
    longest = max(lengths) + ROOM
    num_pages = 2 * len(lengths) * most_of_a_job(longest)
    shape = parts.cache_shape()
    small = num_pages * GPU_PAGE // SMALL_PAGE
    arenas: dict[str, Callable[[], KVArena]] = {
        "slots": lambda: KVArena(shape, len(lengths), longest),
        "pages in order": lambda: PagedArena(shape, len(lengths), longest, PoolSize(num_pages)),
        "pages in any order": lambda: shuffled(PagedArena(shape, len(lengths), longest, PoolSize(num_pages))),
        "small pages in any order": lambda: shuffled(
            PagedArena(shape, len(lengths), longest, PoolSize(small, SMALL_PAGE))
        ),
    }
    found: list[Row] = []
    for name, make in arenas.items():
        found.append({"caches": name, "sha256": work_digest(target_over(parts, make()), lengths)[:16]})
        parts.forget_unused()
    digests = {row["sha256"] for row in found}
    words = "one digest of all bits" if len(digests) == 1 else f"{len(digests)} digests, expected one"
    return Finding(passed=len(digests) == 1, words=words, rows=found)


def _shared(parts: Parts, length: int) -> Finding:
    """A second cache begins with the pages of the first one, beside a graph that was captured before."""
    target = target_over(
        parts, shuffled(PagedArena(parts.cache_shape(), 2, length + ROOM, PoolSize(4 * most_of_a_job(length))))
    )
    first, second = (target.new_cache(length + ROOM) for _ in range(2))
    token_ids = [random.Random(7).randrange(target.vocab_size) for _ in range(length)]
    while first.length < length:
        target.read(first, token_ids[first.length :])
    second.copy_from(first, length)
    ours, theirs = target.verify([tree_rows(cache, 5, DraftTree()) for cache in (first, second)])
    is_same = ours.logits.equal(theirs.logits)
    return Finding(
        passed=is_same, words=f"logits behind shared pages: {'the same' if is_same else 'OTHER'} bits", rows=[]
    )


def shuffled(arena: PagedArena) -> PagedArena:
    """The arena, whose pages are taken in any order."""
    random.Random(arena.num_pages).shuffle(arena.pool._free)
    return arena


def target_over(parts: Parts, arena: KVArena) -> ArenaTarget:
    """The model over an arena, where nothing lies yet."""
    arena.buffer.zero_()
    forwards = CudaForwards(parts.weights, arena, frozenset(), parts.num_splits, parts.kernels, parts.capture)
    return ArenaTarget(forwards, parts.files)


def kept_rows(trial: Trial) -> Iterator[Try]:
    """Attention to codes against attention to the numbers that they stand for, and trees against plain decoding."""
    parts = trial.parts()
    for kv_dtype in CODES:
        yield (
            f"attention to {kv_dtype}",
            functools.partial(_attention_to_codes, parts, trial.sizes.kept_length, kv_dtype),
        )
        yield f"rows with {kv_dtype}", functools.partial(_rows_with_codes, parts, kv_dtype)


def _attention_to_codes(parts: Parts, length: int, kv_dtype: KVDtype) -> Finding:
    random_numbers = random.Random(3)
    layer = OneLayer(parts, 2, length)
    codes = coded(layer.arena.buffer, CODES[kv_dtype], CUDA_SCALE_BYTES)
    layer.arena.buffer.copy_(numbers_of(codes, parts.dtype, parts.sizes.head_dim))
    placed, query = layer.placed(random_numbers, length, 2, NUM_ATTENDED), layer.random_query(3)
    num_rows = sum(len(each) for each, _ in placed)
    expected, plain_seconds = layer.attended(query[:num_rows], placed), parts.seconds(layer.attend)
    numbers, layer.arena.buffer = layer.arena.buffer, codes
    found, seconds = layer.attended(query[:num_rows], placed), parts.seconds(layer.attend)
    differing = sum(not ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))
    read = [sum(each.boundary for each, _ in placed) * buffer[0, :, 0, :, 0].nbytes for buffer in (codes, numbers)]
    figures: list[Row] = [
        {"keys": name, "ms": 1000 * taken, "GB/s": num_bytes / taken / 1e9}
        for name, taken, num_bytes in zip((kv_dtype, "numbers"), (seconds, plain_seconds), read, strict=True)
    ]
    return Finding(passed=differing == 0, words=differing_bits(differing, num_rows, "rows"), rows=figures)


def _rows_with_codes(parts: Parts, kv_dtype: KVDtype) -> Finding:
    shape = dataclasses.replace(parts.cache_shape(), kv_dtype=kv_dtype, kv_scale_bytes=CUDA_SCALE_BYTES)
    target = target_over(
        parts, PagedArena(shape, NUM_CACHES, MAX_LENGTH, PoolSize(NUM_CACHES * most_of_a_job(MAX_LENGTH)))
    )
    found = probe_rows(target, parts.extent.num_rows // 4 or 1, most_nodes=parts.extent.most_nodes)
    return Finding(
        passed=found.num_differing == 0, words=differing_bits(found.num_differing, found.num_rows, "tree rows"), rows=[]
    )
