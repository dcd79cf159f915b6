"""Plans a GPU's memory at start-up: slots, pages, offload, and what drafting takes (without torch)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swiftbatch.jobs.run.compute_options import AttentionName
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS, NUM_ROWS, RING_LAYERS, most_slots
from swiftbatch.worker.kv.free_memory import MEMORY
from swiftbatch.worker.kv.kv_capacity import GB, GPU_PAGE, MAX_TREE_NODES, KVRoomError, WindowPages, pages_of
from swiftbatch.worker.kv.model_sizes import ModelSizes

if TYPE_CHECKING:
    from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape

CAPACITY_BLOCK = 64  # a slot is whole blocks of the attention kernels
LOGIT_BYTES = 60  # decoded (4), drawn from (4), scores (8), tempered, sorted (8), order (8), what sorting takes (28)
FLOAT_BYTES = 4
DECODED_BYTES = 4  # bytes of a logit that is not drawn from in place
SAMPLING_SLOT_BYTES = 12  # of a token for each job: counted twice, and its bias
GRAPH_RESERVE = 400_000_000  # graphs, cuBLAS workspaces, what draws keep of slots, rounding: not measured yet


PROGRAMS_PER_MULTIPROCESSOR = 4  # attention's programs: two waves of two, as their shared memory allows
LATENT_TILE_HEADS = 64  # heads of a row that a program of latent attention has, whose memory is all of a multiprocessor


def splits_of(num_multiprocessors: int, sizes: ModelSizes, num_rows: int = NUM_ROWS) -> int:
    """Parts that prefixes are attended to in: a constant of device, model and rows, so bits depend on all of them.

    The more rows a forward has, the more jobs share the device, and the fewer parts each needs: partial sums of all
    rows stay as large.
    """
    if sizes.latent is None:
        num_splits = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // sizes.num_kv_heads
    else:
        num_splits = num_multiprocessors // -(-sizes.num_heads // LATENT_TILE_HEADS)
    return max(1, num_splits * NUM_ROWS // num_rows)


def slot_capacity(max_length: int) -> int:
    """Entries of an arena's slot for jobs of up to `max_length` positions: these, a tree behind them, whole blocks."""
    return -(-(max_length + MAX_TREE_NODES) // CAPACITY_BLOCK) * CAPACITY_BLOCK


# Rows of tiles that a slot's rows, in two blocks at most, may leave empty, by query heads a KV head.
PADDED_ROWS: dict[AttentionName, Callable[[int], int]] = {
    "triton": lambda heads_per_kv: 0,
    "flash": lambda heads_per_kv: 2 * (NUM_ROWS // heads_per_kv - 1),
}


@dataclass(frozen=True)
class GPUMemory:
    """A GPU as a plan sees it."""

    free_bytes: int  # free once the GPU's context is there
    num_splits: int  # into which the attention kernels cut a prefix: a constant of the device
    attention: AttentionName = "triton"
    num_rows: int = NUM_ROWS  # of a forward

    def with_rows(self, num_rows: int) -> GPUMemory:
        """The same GPU with forwards of so many rows, whose prefixes are cut into as many times fewer splits."""
        num_splits = max(1, self.num_splits * self.num_rows // num_rows)
        return replace(self, num_splits=num_splits, num_rows=num_rows)

    def scratch_bytes(self, sizes: ModelSizes) -> int:
        """Partial sums of attention: outputs and their log-sum-exp of every split, row and head, in float32."""
        return self.num_rows * self._bytes_per_row(sizes)

    def slot_scratch_bytes(self, sizes: ModelSizes) -> int:
        """Count the bytes that each slot adds to the partial sums of attention."""
        return PADDED_ROWS[self.attention](sizes.num_heads // sizes.num_kv_heads) * self._bytes_per_row(sizes)

    def _bytes_per_row(self, sizes: ModelSizes) -> int:
        return self.num_splits * sizes.num_heads * (sizes.value_dim + 1) * 4


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that an engine drafts with."""

    part_bytes: int = 0  # its trained parts
    slot_bytes: int = 0  # what it keeps for a slot
    num_scanned: int | None = None  # jobs whose texts have room to be scanned, among `part_bytes`; None: all
    has_engine: bool = False  # what `SlotsWanted.engine` takes is among it


NO_DRAFTS = DraftMemory()
DraftMemoryOf = Callable[["ModelSizes"], DraftMemory]
"""What an engine takes for a target of these sizes."""


@dataclass(frozen=True)
class SlotsWanted:
    """The needs that a GPU's memory is planned for."""

    longest_job: int  # positions
    partial_budget: int = 0  # entries of the partial cache that drafts keep beside each slot; 0: they keep none
    num_slots: int | None = None  # None: as many as fit
    scanned_best: int = 0  # keys that queries of drafts read exactly of texts that are scanned; 0: none is
    part_bytes: int = 0  # bytes of what an engine drafts with, once
    draft: ModelSizes | None = None  # sizes of a draft model, whose caches have `draft_length` positions a slot
    draft_length: int = 0
    engine: DraftMemoryOf | None = None  # what the engine takes beside that
    can_lack_engine: bool = False  # where that has no room, there are other drafts
    host_bytes: int | None = None  # host memory that caches may lie in; None: they lie on the GPU
    num_unwritten: int | None = None  # positions that checkpoints lag by, where caches forget; None: they forget none


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of all that lies on the GPU while a run lasts."""

    longest_job: int  # positions
    capacity: int  # entries of a slot
    num_slots: int
    free_bytes: int
    weight_bytes: int
    slot_bytes: int  # of keys and values, and of states where layers have some
    drafts: DraftMemory
    scratch_bytes: int
    row_bytes: int  # activations and logits
    slot_scratch_bytes: int = 0  # of attention, for each slot
    num_pages: int = 0  # that all slots share, beside what each has
    page_bytes: int = 0
    windows: WindowPages | None = None  # of layers with a window, where caches forget: beside the other pages
    window_page_bytes: int = 0
    reserve_bytes: int = GRAPH_RESERVE

    @property
    def work_bytes(self) -> int:
        """The bytes that a forward needs, whatever the number of slots."""
        return self.scratch_bytes + self.row_bytes + self.reserve_bytes

    @property
    def used_bytes(self) -> int:
        return self._fixed_bytes + self.num_slots * self.bytes_per_slot

    @property
    def num_drafted(self) -> int:
        """Jobs that drafts have room for beside their caches."""
        return self.num_slots if self.drafts.num_scanned is None else min(self.num_slots, self.drafts.num_scanned)

    @property
    def num_fitting(self) -> int:
        """Slots that there is room for; 0 also where the weights do not fit."""
        return max(0, self.left_bytes // self.bytes_per_slot)

    @property
    def left_bytes(self) -> int:
        """The bytes for slots; fewer than none where all else does not fit."""
        return self.free_bytes - self._fixed_bytes

    @property
    def bytes_per_slot(self) -> int:
        """The bytes that each slot has for itself."""
        return self.slot_bytes + self.drafts.slot_bytes + self.slot_scratch_bytes

    def rows(self) -> list[tuple[str, int]]:
        """The plan as a table: what it is for, and bytes."""
        return [
            ("weights", self.weight_bytes),
            (self._kept, self.num_slots * self.slot_bytes + self.pool_bytes),
            ("drafts", self.drafts.part_bytes + self.num_slots * self.drafts.slot_bytes),
            ("scratch of attention", self.scratch_bytes + self.num_slots * self.slot_scratch_bytes),
            ("activations and logits", self.row_bytes),
            ("graphs and workspaces", self.reserve_bytes),
            ("in all", self.used_bytes),
            ("free before", self.free_bytes),
        ]

    @property
    def pool_bytes(self) -> int:
        """The bytes of all pages."""
        num_windowed = 0 if self.windows is None else self.windows.num_pages
        return self.num_pages * self.page_bytes + num_windowed * self.window_page_bytes

    @property
    def _kept(self) -> str:
        """The keys and values that there is room for, in words."""
        if self.num_pages:
            behind = "" if self.windows is None else f" and {self.windows.num_pages:,} of layers with a window"
            pages = f"{self.num_pages:,} pages of {GPU_PAGE:,} positions{behind}"
            return f"keys and values, {pages} for {self.num_slots} jobs"
        return f"keys and values, {self.num_slots} x {self.capacity:,} positions"

    @property
    def _fixed_bytes(self) -> int:
        """The bytes that do not depend on the number of slots."""
        return self.weight_bytes + self.drafts.part_bytes + self.work_bytes + self.pool_bytes


PlanMemory = Callable[["ModelSizes", GPUMemory, int, int | None, DraftMemory], MemoryPlan]
"""As `plan_memory`: sizes, the GPU, the longest job, slots that were asked for, what drafts take."""


def plan_memory(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Share a GPU out, before the weights are loaded, for jobs of up to `longest_job` positions.

    `num_slots` None means as many as fit, `most_slots` at most. Raises KVRoomError where one slot, or the number that
    was asked for, does not fit.
    """
    plan = one_slot(sizes, gpu, longest_job, drafts)
    if plan.num_fitting < 1:
        raise none_fits(plan)
    plan = replace(plan, num_slots=min(most_slots(gpu.num_rows), plan.num_fitting) if num_slots is None else num_slots)
    if plan.num_fitting < plan.num_slots:
        raise too_many_slots(plan, f"with jobs of {longest_job:,} positions that")
    return plan


def one_slot(sizes: ModelSizes, gpu: GPUMemory, longest_job: int, drafts: DraftMemory = NO_DRAFTS) -> MemoryPlan:
    """The plan of a worker with one slot, which may not fit."""
    capacity = slot_capacity(longest_job)
    return MemoryPlan(
        longest_job=longest_job,
        capacity=capacity,
        num_slots=1,
        free_bytes=gpu.free_bytes,
        weight_bytes=sizes.weight_bytes,
        slot_bytes=sizes.kept_bytes(capacity) + sizes.state_bytes,
        drafts=drafts,
        scratch_bytes=gpu.scratch_bytes(sizes),
        row_bytes=_row_bytes(sizes, gpu.num_rows) + _sampling_bytes(sizes, gpu.num_rows),
        slot_scratch_bytes=gpu.slot_scratch_bytes(sizes),
    )


def draft_model_memory(sizes: ModelSizes, length: int, num_rows: int = NUM_ROWS) -> DraftMemory:
    """A small model beside the target, with one slot more than that; its tokens are drawn in the target's buffers."""
    model = decoder_memory(sizes, GPUMemory(0, draft_splits(length), num_rows=num_rows), length)
    return DraftMemory(model.part_bytes + model.slot_bytes, model.slot_bytes)


def decoder_memory(sizes: ModelSizes, gpu: GPUMemory, length: int) -> DraftMemory:
    """A decoder beside the target, with as many slots of so many positions, whose logits are only decoded."""
    plan = one_slot(sizes, gpu, length)
    once = plan.weight_bytes + plan.scratch_bytes + _row_bytes(sizes, gpu.num_rows, DECODED_BYTES)
    return DraftMemory(once, plan.slot_bytes)


def draft_splits(length: int) -> int:
    """Parts that a draft model's prefixes are attended to in: no more than they have blocks."""
    return slot_capacity(length) // CAPACITY_BLOCK


def _row_bytes(sizes: ModelSizes, num_rows: int, logit_bytes: int = LOGIT_BYTES) -> int:
    """Static buffers of a forward: state, delta, normed, hidden; stacked, turned and mixed heads; MLP; logits.

    And of experts, what each that a row chose makes of it; of layers with a state, what goes in and comes out of it.
    """
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    heads = (query + 2 * key) + 2 * query
    if (latent := sizes.latent) is not None:
        given = sizes.num_heads * latent.query_dim
        of_vectors = 2 * latent.query_rank + given if latent.query_rank else given
        heads = of_vectors + latent.entry_dim + query + sizes.num_heads * (latent.rank + latent.value_dim)
    widths = 4 * sizes.hidden + heads + 3 * sizes.intermediate
    if sizes.experts is not None:
        widths += sizes.experts.num_chosen * (sizes.experts.width + sizes.hidden)
    numbers = 0 if sizes.recurrent is None else _mixed_numbers(sizes.recurrent)
    return num_rows * (widths * sizes.item_size + FLOAT_BYTES * numbers + sizes.vocab * logit_bytes)


def _mixed_numbers(shape: RecurrentShape) -> int:
    """Numbers of a row in front of a state and behind it, with the weights of its path; none is wider than float32."""
    values = shape.num_heads * shape.value_dim
    return 3 * shape.num_channels + 6 * values + 2 * shape.num_heads * (CAPACITY_BLOCK + 2)


def _sampling_bytes(sizes: ModelSizes, num_rows: int) -> int:
    """Count what draws keep of each job beyond those that the reserve is for."""
    return (most_slots(num_rows) - MOST_SLOTS) * sizes.vocab * SAMPLING_SLOT_BYTES


def too_many_slots(plan: MemoryPlan, what: str) -> KVRoomError:
    """Say of a plan for a number of slots that was asked for what needs more than there is."""
    return KVRoomError(
        f"--slots {plan.num_slots}: {what} needs {plan.used_bytes / GB:,.1f} GB, the GPU has "
        f"{plan.free_bytes / GB:,.1f} GB free; use --slots {plan.num_fitting}, or fewer max_tokens"
    )


def none_fits(plan: MemoryPlan) -> KVRoomError:
    """Say of a plan for the longest job why it has no room."""
    drafts = plan.drafts.part_bytes + plan.drafts.slot_bytes
    work_bytes = plan.work_bytes + plan.slot_scratch_bytes
    parts = (plan.weight_bytes, plan.slot_bytes, drafts, work_bytes)
    weights, slot, drafting, work = (f"{part / GB:,.1f}" for part in parts)
    return KVRoomError(
        f"the longest job, {plan.longest_job:,} positions, has no room on the GPU: weights {weights}, its keys and "
        f"values {slot}, its drafts {drafting} and work space {work} need {sum(parts) / GB:,.1f} GB, "
        f"{plan.free_bytes / GB:,.1f} GB are free; use fewer max_tokens, --kv-offload with a folder, or a GPU with "
        "more memory"
    )


# Plans of a GPU's memory: where caches take pages as they grow, or lie in the host's memory.


DRAFT_SHARE = 0.25  # of what is left beside the weights, for what drafts keep, where few jobs fit at their longest


def plan_pages(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Share a GPU out as `plan_memory` does, for a pool of pages: as many as fit, and as slots can have at most.

    Raises KVRoomError where the longest job, or what drafts keep for so many slots beside it, does not fit.
    """
    least = most_of_a_job(longest_job)
    alone = replace(one_slot(sizes, gpu, longest_job, drafts), slot_bytes=sizes.state_bytes)
    window_bytes = GPU_PAGE * sizes.window_bytes_per_position
    pool = replace(alone, num_pages=least, page_bytes=GPU_PAGE * sizes.kept_bytes_per_position - window_bytes)
    if sizes.held is not None:
        most_held = min(least, pages_of(sizes.held.num_whole, GPU_PAGE))
        pool = replace(pool, windows=WindowPages(most_held, sizes.held), window_page_bytes=window_bytes)
    longest = replace(alone, slot_bytes=sizes.state_bytes + pool.pool_bytes)
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
    """The pages of the longest job that a slot takes."""
    return pages_of(slot_capacity(longest_job) - MAX_TREE_NODES, GPU_PAGE)


def _divided(plan: MemoryPlan, windows: WindowPages) -> MemoryPlan:
    """Divide what is left between the pools of a plan, which have the pages of the longest job each.

    So that both are full together where jobs are of a length between a window and the longest job: those of shorter
    ones have pages of the first pool left, and those of longer ones pages of the second.
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
    """Return how many slots gain, `most` of them if what drafts keep for each leaves most of the memory to pages.

    Else as many as take `DRAFT_SHARE` of the memory, or as leave the pages of all jobs that would fit at their longest.
    """
    if not pool.bytes_per_slot:
        return most
    longest = pool.pool_bytes
    beside_weights = pool.left_bytes + longest
    num_longest = beside_weights // (pool.bytes_per_slot + longest)
    by_share = int(DRAFT_SHARE * beside_weights) // pool.bytes_per_slot
    beside_longest = (beside_weights - num_longest * longest) // pool.bytes_per_slot
    return min(most, pool.num_fitting, max(by_share, beside_longest))


HOST_SHARE = 0.8  # share of the free memory for caches; checkpoints on their way and other programs need some, too


def plan_offload(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    host_bytes: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Plan as `plan_memory` does, for caches in `host_bytes` of free memory; `slot_bytes` are those on the GPU.

    Raises KVRoomError where the longest job has no room here or there.
    """
    num_in_host = int(HOST_SHARE * host_bytes) // (slot_capacity(longest_job) * sizes.kept_bytes_per_position)
    if num_in_host < 1:
        raise KVRoomError(_no_room(sizes, longest_job, MEMORY, HOST_SHARE * host_bytes))
    layer_bytes = sizes.num_parts * sizes.num_kv_heads * sizes.head_dim * sizes.item_size
    ring = replace(sizes, bytes_per_position=min(sizes.bytes_per_position, RING_LAYERS * layer_bytes))
    if one_slot(ring, gpu, longest_job, drafts).num_fitting < 1:
        raise KVRoomError(_no_room(ring, longest_job, "the GPU, beside weights and work space", gpu.free_bytes))
    plan = plan_memory(ring, gpu, longest_job, num_slots, drafts)
    return replace(plan, num_slots=min(plan.num_slots, num_in_host))


def _no_room(sizes: ModelSizes, longest_job: int, place: str, num_free: float) -> str:
    needed = slot_capacity(longest_job) * sizes.kept_bytes_per_position
    return (
        f"the longest job, {longest_job:,} positions, has no room with --kv-offload: its keys and values need "
        f"{needed / GB:,.2f} GB of {place}, which has {num_free / GB:,.2f} GB for them; use fewer max_tokens, or a "
        "machine with more memory"
    )
