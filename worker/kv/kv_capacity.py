"""Bytes and pages of KV caches, now and as they grow, and the memory that is free for them, without torch."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swiftbatch.jobs.errors import ModelError, UserError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.gpu_kernel_choice import refuse_indexed, refuse_latent
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, KV_SCALE_BYTES, ROW_CHOICES
from swiftbatch.worker.model.architectures.attention_layers import Windows
from swiftbatch.worker.model.architectures.catalogue import attending_layers, needs_indexers, recurrent_shape
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape
from swiftbatch.worker.model.decoder_config import kernel_config

if TYPE_CHECKING:
    import torch


GB = 1e9
MAX_TREE_NODES = 127  # a full cache has room for one after its positions
# this many steps of a recurrent layer may follow a boundary: two blocks, a root and a tree
NUM_STEPS = 2 * BLOCK + MAX_TREE_NODES + 1
FIRST_STEPS = 2 * BLOCK + 32  # a CPU's sequence has room for these at first
FORGETS_EVERY = 256  # layers with a window forget so many positions at a time
NUM_ASKED = BLOCK  # rows may still need so many newest positions, beside those for rollbacks of loops
NUM_UNWRITTEN = 1024  # a checkpoint usually lags by so many positions
ITEM_SIZES = {"bfloat16": 2, "float32": 4}
TOO_LONG = "longer_than_slot"  # error code of a job that fits in no slot of its worker


class KVRoomError(UserError):
    """No memory for a key-value cache."""


class TooLongError(KVRoomError):
    """Sequence longer than any slot of its worker, so a retry there fails as well."""


class PagesError(KVRoomError):
    """No free page for a sequence's next positions; a retry works once other sequences have left."""


def bytes_per_position(config: dict[str, Any], dtype: str, kv_dtype: KVDtype | None = None) -> int | None:
    """Return the bytes of one position in a text model's cache, or None if the config does not tell."""
    if (dense := kernel_config(config)) is not None and dense.latent is not None:
        num_rows = sum(dense.stripes) if dense.stripes else dense.num_layers
        return num_rows * dense.latent.sizes.entry_dim * ITEM_SIZES[dtype]
    num_heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or (hidden_size // num_heads if num_heads and hidden_size else None)
    if "qk_nope_head_dim" in config:  # in transformers' latent attention, `head_dim` is the rotary part alone
        head_dim = max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
    num_layers = len(attending_layers(config))
    if not (num_layers and num_kv_heads and head_dim):
        return None
    num_heads = sum(dense.stripes) if dense is not None and dense.stripes else num_layers * num_kv_heads
    row_bytes = head_dim * ITEM_SIZES[dtype] if kv_dtype is None else head_dim + KV_SCALE_BYTES
    return int(2 * num_heads * row_bytes)


def state_bytes(config: Mapping[str, Any], dtype: str) -> int:
    shape = recurrent_shape(config)
    return 0 if shape is None else state_bytes_of(shape, ITEM_SIZES[dtype])


def state_bytes_of(shape: RecurrentShape, item_size: int) -> int:
    """Return the bytes of the newest states, the states at the boundary, and all steps."""
    return 2 * shape.state_bytes + NUM_STEPS * shape.step_bytes(item_size)


@dataclass(frozen=True)
class HeldPositions:
    """Positions that a cache keeps if its layers with a window forget."""

    num_whole: int  # all layers keep the newest positions
    share: float  # other layers keep this share of an older position's bytes

    def of(self, num_positions: int, num_shared: int = 0) -> int:
        """Return how many positions would take the same memory if no layer forgot; `num_shared` are kept in full."""
        num_own = max(0, num_positions - num_shared)
        behind = max(0, num_own - self.num_whole)
        return num_positions - behind + math.ceil(self.share * behind)


def held_positions(
    windows: Windows, num_unwritten: int = NUM_UNWRITTEN, stripes: tuple[int, ...] = ()
) -> HeldPositions | None:
    """Return the positions that caches of these layers keep, or None if no layer has a window.

    `stripes` are the layers' bytes in relation to each other; () if all take the same.
    """
    sizes = [size for size in windows if size is not None]
    if not sizes:
        return None
    bytes_of = stripes or (1,) * len(windows)
    num_whole = sum(each for each, size in zip(bytes_of, windows, strict=True) if size is None)
    return HeldPositions(max(sizes) + NUM_ASKED + FORGETS_EVERY + num_unwritten, num_whole / sum(bytes_of))


def held_of(config: dict[str, Any]) -> HeldPositions | None:
    """Return `held_positions` of a text model on a CPU, from its config."""
    dense = None if recurrent_shape(config) is not None else kernel_config(config)
    return None if dense is None else held_positions(dense.kept_windows, stripes=dense.stripes)


# Pages that growing caches take, without torch, because the driver plans with them.


PAGE = 64  # positions per page of a CPU, whose real memory pages are smaller
GPU_PAGE = 256  # positions per page of a GPU: half a page per job is unused, and a block needs one look-up
HORIZON = 2048  # a starting job has room for so many tokens; evicting it costs far less
ROOM_BEHIND = MAX_TREE_NODES + 1  # a step may write so many positions after the committed ones


class Growth(NamedTuple):
    """Positions of one job: now, at its expected end, and the first ones that it shares."""

    now: int
    end: int
    num_shared: int = 0

    @property
    def left(self) -> int:
        return max(0, self.end - self.now)


class WindowPages(NamedTuple):
    """Pages of layers with a window, which have a pool of their own where caches forget."""

    num_pages: int
    held: HeldPositions


class PoolSize(NamedTuple):
    """Pages of a worker's caches."""

    num_pages: int
    page: int = GPU_PAGE
    windows: WindowPages | None = None  # None: all layers use this pool


def pages_of(num_positions: int, page: int = PAGE) -> int:
    """Return the pages of `num_positions` and one step's rows."""
    return -(-(num_positions + ROOM_BEHIND) // page)


def held_in_windows(windows: Windows, num_unwritten: int) -> HeldPositions | None:
    """Return the positions whose window pages a job keeps; None if all layers have a window, or if no layer has one."""
    sizes = [size for size in windows if size is not None]
    if not sizes or len(sizes) == len(windows):
        return None
    num_behind = ROW_CHOICES[-1] - ROOM_BEHIND
    return HeldPositions(max(sizes) + BLOCK + NUM_ASKED + GPU_PAGE + num_behind + num_unwritten, 0.0)


def most_pages(jobs: Iterable[Growth], page: int = PAGE, held: HeldPositions | None = None) -> int:
    """Return the most pages that jobs take within `HORIZON` if all grow equally fast and leave at their expected ends.

    The maximum is at one of the ends or at the horizon, since until a job leaves, all others grow.
    """
    most, now, by_end = 0, 0, sorted(jobs, key=lambda job: job.left, reverse=True)
    for count, job in enumerate(by_end, start=1):
        now, time = now + job.now, min(job.left, HORIZON)
        grown = (
            now + count * time
            if held is None
            else sum(held.of(each.now + time, each.num_shared) for each in by_end[:count])
        )
        most = max(most, grown + count * (ROOM_BEHIND + page - 1))
    return -(-most // page)


def fit(jobs: Collection[Growth], pool: PoolSize, held: HeldPositions | None, num_beside: int = 0) -> bool:
    """Return whether a pool has pages enough for `jobs` until they leave, or for a while.

    Each job's states take as much as `num_beside` positions.
    """
    if num_beside:
        jobs = [job._replace(now=job.now + num_beside, end=job.end + num_beside) for job in jobs]
    if pool.windows is not None:
        own = [job._replace(num_shared=0) for job in jobs]  # positions kept for other sequences are freed on demand
        if not _have_pages(own, pool.windows.num_pages, pool.page, pool.windows.held):
            return False
    return _have_pages(jobs, pool.num_pages, pool.page, held)


def _have_pages(jobs: Collection[Growth], num_pages: int, page: int, held: HeldPositions | None) -> bool:
    at_their_ends = sum(job.end if held is None else held.of(job.end, job.num_shared) for job in jobs)
    if at_their_ends + len(jobs) * (ROOM_BEHIND + page - 1) <= num_pages * page:
        return True  # the usual case; simulating each job's end is slow
    return most_pages(jobs, page, held) <= num_pages


# Free memory of the machine, of a folder and of a GPU.


MEMORY = "the memory of this machine"
OWN_GROUP = Path("/sys/fs/cgroup")  # control group of this container
EMPTY_SHARE = 0.97  # a GPU is unused if this share of its memory is free
STILL_SECONDS, MOST_SETTLING_SECONDS = 2.0, 30.0  # wait until free memory has not risen for 2 s, 30 s at most
POLL_SECONDS = 0.1


def check_folder(kv_offload: str | None) -> None:
    """Raise KVRoomError if `kv_offload` is no writable folder."""
    if kv_offload is None:
        return
    try:
        tempfile.TemporaryFile(dir=kv_offload).close()
    except OSError as error:
        raise KVRoomError(
            f"--kv-offload {kv_offload}: {error.strerror or error}; expected a folder that can be written"
        ) from None


def refuse_offload(device: str, kv_offload: str | None) -> None:
    """Raise KVRoomError if a GPU's caches were asked into a folder."""
    if device != "cpu" and kv_offload is not None:
        raise KVRoomError(
            f"--kv-offload {kv_offload}: caches of a GPU stay in its memory, in pages that jobs take as they grow; "
            "leave the option away, and use --kv-dtype fp8 or int8 for longer or more jobs, or --device cpu"
        )


def refuse_other_caches(model: str, config: dict[str, Any], kv_dtype: KVDtype | None, kv_offload: str | None) -> None:
    """Raise ModelError for caches in 8 bits, or in a folder, that a text model's layers cannot have."""
    dense = kernel_config(config)
    if dense is not None and dense.latent is not None:
        refuse_latent(kv_dtype, model)
    if needs_indexers(config):
        refuse_indexed(kv_dtype, model)
    has_states = recurrent_shape(config) is not None
    if kv_offload is not None and (has_states or has_wide_heads(config)):
        has = "a state in place of a cache" if has_states else "heads of different sizes"
        raise ModelError(f"--kv-offload: {model} has layers with {has}; leave it out")


def has_wide_heads(config: dict[str, Any]) -> bool:
    """Return whether some layers of a text model have wider heads than others."""
    dense = kernel_config(config)
    return dense is not None and bool(dense.stripes)


def place_of_caches(device: str, kv_offload: str | None) -> str | None:
    """Return the folder of a CPU's caches, or `MEMORY` for the host's memory, or None for a GPU's own memory."""
    return kv_offload or MEMORY if device == "cpu" else None


@dataclass(frozen=True)
class KVRoom:
    """Place of the caches, and how many bytes a cache takes there."""

    place: str
    bytes_per_position: int
    state_bytes: int = 0  # does not depend on its length
    held: HeldPositions | None = None  # None: caches forget nothing

    def refuse_too_long(self, num_positions: int, num_held: int = 0) -> None:
        """Raise KVRoomError if a cache needs more than the free bytes plus those that `num_held` positions take."""
        num_kept = num_positions if self.held is None else self.held.of(num_positions)
        needed = num_kept * self.bytes_per_position + self.state_bytes
        free = self.free_bytes() + num_held * self.bytes_per_position
        if needed > free:
            raise KVRoomError(
                f"max_tokens: cannot allocate the key-value cache: {num_positions:,} positions need "
                f"{needed / GB:,.2f} GB, {self.place} has {free / GB:,.2f} GB left; "
                "use fewer max_tokens, or --kv-offload with a folder that has more"
            )

    def free_bytes(self) -> float:
        """Return the free bytes of the folder's file system or of the memory."""
        if self.place != MEMORY:
            return shutil.disk_usage(self.place).free
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        [kibibytes] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        return min(kibibytes * 1024, _left_in_group(OWN_GROUP))


def _left_in_group(folder: Path) -> float:
    """Return the bytes left in a control group (version 2), or infinity if the group has no limit."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))  # the word "max" raises ValueError
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return math.inf
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))  # the kernel frees the page cache on demand


def settled_free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU once they stop rising: a killed worker frees its memory late."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    risen = started = time.monotonic()
    while free < EMPTY_SHARE * total and time.monotonic() < min(risen + STILL_SECONDS, started + MOST_SETTLING_SECONDS):
        time.sleep(POLL_SECONDS)
        before, free = free, torch.cuda.mem_get_info(device)[0]
        risen = time.monotonic() if free > before else risen
    return int(free)
