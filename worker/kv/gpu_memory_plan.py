"""Plan of a GPU's memory at start-up, without torch: slots, pages, drafts, and rows per forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from swiftbatch.jobs.run.run_records import AttentionName
from swiftbatch.worker.kernels.kernel_sizes import (
    HEAD_BLOCKS,
    LATENT_BLOCKS,
    MOST_PARTS,
    NUM_ROWS,
    ROW_CHOICES,
    most_slots,
    narrower_rows,
    num_splits,
)
from swiftbatch.worker.kv.kv_capacity import (
    GB,
    GPU_PAGE,
    HORIZON,
    MAX_TREE_NODES,
    KVRoomError,
    WindowPages,
    pages_of,
)
from swiftbatch.worker.kv.model_sizes import ModelSizes
from swiftbatch.worker.model.rank_faults import ranks_fault

if TYPE_CHECKING:
    from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape
    from swiftbatch.worker.model.decoder_config import DecoderConfig


CAPACITY_BLOCK = 64  # attention kernels read whole blocks of a slot
FLOAT_BYTES = 4
LOGIT_BYTES = 3 * FLOAT_BYTES + 1  # a row's logits, scores and tempered scores; the bests of blocks, and a mask
CUT_BYTES = 48_000  # of a row's sums by bytes, which find the cuts of filters, and of its words and results
ROW_INTEGERS = 9  # of a row's chosen keys, beside their list
SLOT_LOGIT_BYTES = 12  # bytes per token of a job: its counts in the penalty's window and in the output, and its bias
SLOT_WORD_BYTES = 1024  # of a job's tokens that enter and leave its counts
GRAPH_RESERVE = 400_000_000  # an estimate of graphs, cuBLAS workspaces and rounding
GRAPH_BYTES = 16_000_000  # of the graph of each smaller number of rows, with its table: an estimate
SLACK = 0.015  # share of the free memory for what no plan counts, such as copies of pages


def slot_capacity(max_length: int) -> int:
    return -(-(max_length + MAX_TREE_NODES) // CAPACITY_BLOCK) * CAPACITY_BLOCK


# The most rows of tiles that one slot leaves empty (its rows are in up to two blocks), by query heads per KV head.
PADDED_ROWS: dict[AttentionName, Callable[[int], int]] = {
    "triton": lambda heads_per_kv: 0,
    "flash": lambda heads_per_kv: 2 * (NUM_ROWS // heads_per_kv - 1),
}


class Need(NamedTuple):
    """Bytes for one purpose."""

    once: int
    per_slot: int = 0


@dataclass(frozen=True)
class GPUMemory:
    """Properties of a GPU that a plan needs."""

    free_bytes: int  # measured after the GPU's context is created
    attention: AttentionName = "triton"
    num_rows: int = NUM_ROWS

    def sum_bytes(self, sizes: ModelSizes, capacity: int) -> Need:
        """Return the bytes of attention's partial sums: float32 outputs and log-sum-exp per split, row and head."""
        least_blocks = HEAD_BLOCKS if sizes.latent is None else LATENT_BLOCKS
        splits = num_splits(capacity, least_blocks)
        row_bytes = splits * sizes.num_heads * (sizes.value_dim + 1) * FLOAT_BYTES
        num_padded = PADDED_ROWS[self.attention](sizes.num_heads // sizes.num_kv_heads)
        return Need(self.num_rows * row_bytes, num_padded * row_bytes)

    def attention_bytes(self, sizes: ModelSizes, capacity: int) -> Need:
        """Return the bytes of partial sums over whole caches, and of what an indexer scores and chooses of them."""
        if (heads := sizes.own_heads) is not None and (blocks := heads.blocks) is not None:
            of_lists = -(-capacity // blocks.size) + blocks.most_attended(capacity) // CAPACITY_BLOCK
            list_bytes = FLOAT_BYTES * (of_lists + CAPACITY_BLOCK + ROW_INTEGERS) + sizes.item_size * sizes.head_dim
            whole = self.sum_bytes(sizes, capacity)
            return Need(whole.once + self.num_rows * heads.num_kv_heads * list_bytes, whole.per_slot)
        if sizes.latent is None or sizes.latent.indexer is None:
            return self.sum_bytes(sizes, capacity)
        indexer, attended = sizes.latent.indexer, sizes.latent.most_attended(capacity)
        widths = (indexer.num_heads + 1) * indexer.dim + indexer.num_heads
        row_bytes = FLOAT_BYTES * (capacity + attended + CAPACITY_BLOCK + ROW_INTEGERS) + sizes.item_size * widths
        return Need(self.sum_bytes(sizes, attended).once + self.num_rows * row_bytes)


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that an engine takes for drafts."""

    part_bytes: int = 0
    slot_bytes: int = 0
    has_engine: bool = False  # True: the bytes include those of `SlotsWanted.engine`


NO_DRAFTS = DraftMemory()
DraftMemoryOf = Callable[["ModelSizes"], DraftMemory]
"""Bytes of an engine's drafts for a target of these sizes."""


@dataclass(frozen=True)
class SlotsWanted:
    """The requirements of a run for a GPU's memory plan."""

    longest_job: int
    partial_budget: int = 0  # entries of a draft's partial cache per slot; 0: no such cache
    num_slots: int | None = None  # None: as many as fit
    partial_chunk: int | None = None  # positions of the partial cache's chunks, as in `partial_positions`
    part_bytes: int = 0  # does not depend on slots
    draft: ModelSizes | None = None  # its caches have `draft_length` positions per slot
    draft_length: int = 0
    engine: DraftMemoryOf | None = None  # adds the engine's bytes
    can_lack_engine: bool = False  # False: without room for the engine, no plan fits
    num_unwritten: int | None = None  # positions by which checkpoints lag; None: caches forget nothing


WEIGHTS, KEPT, DRAFTS = "weights", "keys, values and states", "drafts"
WORK = SUMS, ROWS, GRAPHS = "partial sums of attention", "activations and logits", "graphs, workspaces and slack"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run takes on the GPU: a table of needs, and pools of pages that all slots share."""

    longest_job: int
    num_slots: int
    free_bytes: int
    needs: Mapping[str, Need]
    has_engine: bool = False  # True: drafts include those of `SlotsWanted.engine`
    num_pages: int = 0
    page_bytes: int = 0
    windows: WindowPages | None = None  # None: no layer forgets
    window_page_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self._fixed_bytes + self.num_slots * self.bytes_per_slot

    @property
    def num_fitting(self) -> int:
        return max(0, self.left_bytes // self.bytes_per_slot)

    @property
    def left_bytes(self) -> int:
        """Return the bytes for slots; negative if the rest does not fit."""
        return self.free_bytes - self._fixed_bytes

    @property
    def bytes_per_slot(self) -> int:
        return sum(need.per_slot for need in self.needs.values())

    @property
    def pool_bytes(self) -> int:
        num_windowed = 0 if self.windows is None else self.windows.num_pages
        return self.num_pages * self.page_bytes + num_windowed * self.window_page_bytes

    @property
    def _fixed_bytes(self) -> int:
        return sum(need.once for need in self.needs.values()) + self.pool_bytes

    def keeping(self, slot_bytes: int) -> MemoryPlan:
        """Return the plan with other bytes of a slot's keys, values and states."""
        return replace(self, needs={**self.needs, KEPT: Need(0, slot_bytes)})


def one_slot(sizes: ModelSizes, gpu: GPUMemory, longest_job: int, drafts: DraftMemory = NO_DRAFTS) -> MemoryPlan:
    """Return the plan for one slot, which may not fit."""
    num_graphs = len(narrower_rows(gpu.num_rows, bool(sizes.packed)))  # with products in Triton
    needs = {
        WEIGHTS: Need(sizes.weight_bytes),
        KEPT: Need(0, sizes.kept_bytes(slot_capacity(longest_job)) + sizes.state_bytes),
        DRAFTS: Need(drafts.part_bytes, drafts.slot_bytes),
        SUMS: gpu.attention_bytes(sizes, slot_capacity(longest_job)),
        ROWS: Need(
            _row_bytes(sizes, gpu.num_rows)
            + angle_bytes(sizes, longest_job)
            + sampling_bytes(sizes.vocab, gpu.num_rows)
        ),
        GRAPHS: Need(GRAPH_RESERVE + num_graphs * GRAPH_BYTES + int(SLACK * gpu.free_bytes)),
    }
    return MemoryPlan(longest_job, 1, gpu.free_bytes, needs, drafts.has_engine)


def draft_model_memory(sizes: ModelSizes, length: int, num_rows: int = NUM_ROWS) -> DraftMemory:
    """Return the bytes of a draft model, which has one slot more than the target."""
    model = decoder_memory(sizes, GPUMemory(0, num_rows=num_rows), length)
    return DraftMemory(model.part_bytes + angle_bytes(sizes, length) + model.slot_bytes, model.slot_bytes)


def decoder_memory(sizes: ModelSizes, gpu: GPUMemory, length: int) -> DraftMemory:
    """Return the bytes of a decoder with the target's slots, without rotary angles."""
    plan, row_bytes = one_slot(sizes, gpu, length), _row_bytes(sizes, gpu.num_rows)
    return DraftMemory(plan.needs[WEIGHTS].once + plan.needs[SUMS].once + row_bytes, plan.needs[KEPT].per_slot)


def angle_bytes(sizes: ModelSizes, length: int) -> int:
    """Return the bytes of the rotary angles of all positions, in float32."""
    return slot_capacity(length) * (sizes.head_dim if sizes.latent is None else sizes.latent.rope_dim) * FLOAT_BYTES


def _row_bytes(sizes: ModelSizes, num_rows: int) -> int:
    """Return the bytes of a forward's static buffers, its logits included."""
    query, key = sizes.num_heads * sizes.widest_dim, sizes.num_kv_heads * sizes.head_dim
    if sizes.own_heads is not None:
        key = max(key, sizes.own_heads.num_kv_heads * sizes.own_heads.head_dim)
    heads = (query + 2 * key) + 2 * query
    if sizes.own_heads is not None and sizes.own_heads.blocks is not None:
        heads += key + sizes.head_dim
    if (latent := sizes.latent) is not None:
        given = sizes.num_heads * latent.query_dim
        of_vectors = 2 * latent.query_rank + given if latent.query_rank else given
        heads = of_vectors + latent.entry_dim + query + sizes.num_heads * (latent.rank + latent.value_dim)
    widths = 4 * sizes.hidden + heads + 3 * sizes.intermediate + sizes.ple_width
    if sizes.experts is not None:
        widths += sizes.experts.num_chosen * (sizes.experts.width + sizes.hidden)
    numbers = MOST_PARTS * sizes.hidden + (0 if sizes.recurrent is None else _mixed_numbers(sizes.recurrent))
    return num_rows * (widths * sizes.item_size + FLOAT_BYTES * (numbers + sizes.vocab))


def _mixed_numbers(shape: RecurrentShape) -> int:
    """Count the activations per row of a recurrent layer, with its path weights."""
    values = shape.num_heads * shape.value_dim
    return 3 * shape.num_channels + 6 * values + 2 * shape.num_heads * (CAPACITY_BLOCK + 2)


def sampling_bytes(vocab: int, num_rows: int) -> int:
    """Return the bytes of draws from a forward's logits: of rows, and of the jobs that they may belong to."""
    of_row = vocab * (LOGIT_BYTES - FLOAT_BYTES) + CUT_BYTES
    return num_rows * of_row + (most_slots(num_rows) + 1) * slot_sampling_bytes(vocab)


def slot_sampling_bytes(vocab: int) -> int:
    return vocab * SLOT_LOGIT_BYTES + SLOT_WORD_BYTES


def too_many_slots(plan: MemoryPlan, what: str) -> KVRoomError:
    return KVRoomError(
        f"--slots {plan.num_slots}: {what} needs {plan.used_bytes / GB:,.1f} GB, the GPU has "
        f"{plan.free_bytes / GB:,.1f} GB free; use --slots {plan.num_fitting}, or fewer max_tokens"
    )


def none_fits(plan: MemoryPlan) -> KVRoomError:
    """Return the error for a longest job that does not fit."""
    groups = ((WEIGHTS,), (KEPT,), (DRAFTS,), WORK)
    parts = [sum(sum(plan.needs[purpose]) for purpose in group) for group in groups]
    weights, slot, drafting, work = (f"{part / GB:,.1f}" for part in parts)
    return KVRoomError(
        f"the longest job, {plan.longest_job:,} positions, has no room on the GPU: weights {weights}, its keys and "
        f"values {slot}, its drafts {drafting} and work space {work} need {sum(parts) / GB:,.1f} GB, "
        f"{plan.free_bytes / GB:,.1f} GB are free; use fewer max_tokens, --kv-dtype fp8 or int8, more "
        "--gpus-per-worker, or a GPU with more memory"
    )


# Plans with pages.


DRAFT_SHARE = 0.25  # slots may take this share of the memory beside the weights if few longest jobs fit


def plan_pages(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Divide a GPU's memory among slots and a pool of pages for jobs of up to `longest_job` positions.

    `num_slots` None means as many as pay. Raises KVRoomError if the longest job or the drafts of `num_slots` slots do
    not fit.
    """
    least = most_of_a_job(longest_job)
    alone = one_slot(sizes, gpu, longest_job, drafts).keeping(sizes.state_bytes)
    window_bytes = GPU_PAGE * sizes.window_bytes_per_position
    pool = replace(alone, num_pages=least, page_bytes=GPU_PAGE * sizes.kept_bytes_per_position - window_bytes)
    if sizes.held is not None:
        most_held = min(least, pages_of(sizes.held.num_whole, GPU_PAGE))
        pool = replace(pool, windows=WindowPages(most_held, sizes.held), window_page_bytes=window_bytes)
    longest = alone.keeping(sizes.state_bytes + pool.pool_bytes)
    if longest.num_fitting < 1:
        raise none_fits(longest)
    plan = replace(pool, num_slots=_slots_that_pay(pool, most_slots(gpu.num_rows)) if num_slots is None else num_slots)
    if plan.used_bytes > plan.free_bytes:
        raise too_many_slots(plan, f"what drafts keep for each, beside the longest job of {longest_job:,} positions,")
    if plan.windows is not None:
        return _divided(plan, plan.windows)
    num_beside = (plan.free_bytes - plan.used_bytes) // plan.page_bytes
    return replace(plan, num_pages=min(plan.num_slots * least, least + num_beside))


def most_of_a_job(longest_job: int) -> int:
    return pages_of(slot_capacity(longest_job) - MAX_TREE_NODES, GPU_PAGE)


def _divided(plan: MemoryPlan, windows: WindowPages) -> MemoryPlan:
    """Divide the free bytes between a plan's two pools; each has at least the longest job's pages.

    The division is such that both pools fill up together if jobs have the geometric mean length of window and longest
    job.
    """
    whole_bytes, window_bytes, longest, most_held = (
        *(plan.page_bytes, plan.window_page_bytes),
        *(plan.num_pages, windows.num_pages),
    )
    num_bytes = plan.free_bytes - plan.used_bytes + plan.pool_bytes
    between = math.isqrt(longest * most_held)
    number = min(plan.num_slots, max(1, num_bytes // (between * whole_bytes + most_held * window_bytes)))
    num_windowed = min(number * most_held, (num_bytes - longest * whole_bytes) // window_bytes)
    num_pages = min(plan.num_slots * longest, (num_bytes - num_windowed * window_bytes) // whole_bytes)
    num_windowed = min(plan.num_slots * most_held, (num_bytes - num_pages * whole_bytes) // window_bytes)
    return replace(plan, num_pages=num_pages, windows=windows._replace(num_pages=num_windowed))


def _slots_that_pay(pool: MemoryPlan, most: int) -> int:
    """Return the number of slots: `most`, or fewer if their drafts would take too much memory from pages."""
    if not pool.bytes_per_slot:
        return most
    longest = pool.pool_bytes
    beside_weights = pool.left_bytes + longest
    num_longest = beside_weights // (pool.bytes_per_slot + longest)
    by_share = int(DRAFT_SHARE * beside_weights) // pool.bytes_per_slot
    beside_longest = (beside_weights - num_longest * longest) // pool.bytes_per_slot
    return min(most, pool.num_fitting, max(by_share, beside_longest))


# Choice of a run's rows per forward, which changes speed and numerics.


ROWS_OF_A_DRAFT = 4  # among many jobs, later nodes are seldom accepted
WIDE_CAPABILITY = 9  # from Hopper on, 256 rows take little longer than reading the weights
ROWS_BEFORE = 128  # the same limit on earlier GPUs (measured on an A100), and for unknown GPUs
ROWS_OF_A_TILE = 128  # rows for which packed weights are decoded once


@dataclass(frozen=True)
class RunLoad:
    """Jobs of one worker, as far as rows depend on them."""

    num_jobs: int
    mean_length: float  # a job's average number of positions over its time
    has_drafts: bool
    has_narrow_forwards: bool = False  # few rows run in cheaper forwards, with the same bits


def rows_that_pay(sizes: ModelSizes, gpu: GPUMemory, load: RunLoad, most: int) -> int:
    """Return the smallest row count that fits all concurrent jobs with their drafts, but at most `most`.

    With narrow forwards it is `most`, for prompts, where its buffers leave room for as many jobs.
    """
    job_bytes = sizes.kept_bytes(round(load.mean_length + HORIZON / 2)) + sizes.state_bytes
    num_together = max(1, min(load.num_jobs, int(one_slot(sizes, gpu, 1).left_bytes / job_bytes)))
    widest = one_slot(sizes, replace(gpu, num_rows=most), 1)
    if load.has_narrow_forwards and min(load.num_jobs, int(widest.left_bytes / job_bytes)) >= num_together:
        return most
    num_wanted = num_together * (ROWS_OF_A_DRAFT if load.has_drafts else 1)
    for num_rows in ROW_CHOICES:
        if num_rows >= most or (num_rows >= num_wanted and most_slots(num_rows) >= num_together):
            return num_rows
    return ROW_CHOICES[-1]


def most_rows(capability: int | None, item_size: int, is_packed: bool) -> int:
    """Return the most rows whose products take about as long as reading the weights.

    Float32 has no tensor cores, so each row costs time.
    """
    if item_size > 2:
        return NUM_ROWS
    wide = ROW_CHOICES[-1] if capability is not None and capability >= WIDE_CAPABILITY else ROWS_BEFORE
    return min(wide, ROWS_OF_A_TILE) if is_packed else wide


def most_together(sizes: ModelSizes, gpu: GPUMemory, length: int) -> int:
    plans = {num_rows: one_slot(sizes, replace(gpu, num_rows=num_rows), length) for num_rows in ROW_CHOICES}
    return max(min(most_slots(num_rows), plan.num_fitting) for num_rows, plan in plans.items())


def fewest_gpus(
    sizes: ModelSizes, decoder: DecoderConfig, gpu: GPUMemory, length: int, choices: Iterable[int]
) -> int | None:
    """Return the smallest of `choices` with which a job of `length` positions fits, or None without any.

    Each GPU has the memory of `gpu`.
    """
    able = (number for number in choices if ranks_fault(decoder, number) is None)
    return next((number for number in able if most_together(sizes.of_a_rank(number), gpu, length)), None)
