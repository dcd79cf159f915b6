"""Bytes and pages that KV caches take, now and as they grow (without torch)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.compute_options import KVDtype
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, KV_SCALE_BYTES, ROW_CHOICES
from swiftbatch.worker.model.architectures.attention_layers import Windows
from swiftbatch.worker.model.architectures.catalogue import num_attending_layers, recurrent_shape
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape
from swiftbatch.worker.model.decoder_config import kernel_windows, latent_sizes

GB = 1e9
MAX_TREE_NODES = 127  # which every full cache has room for behind its positions
NUM_STEPS = 2 * BLOCK + MAX_TREE_NODES + 1  # of a layer with a state, behind a boundary: two blocks, a root, a tree
FIRST_STEPS = 2 * BLOCK + 32  # of these, that a sequence on a CPU has room for until a forward has more rows of it
FORGETS_EVERY = 256  # positions that layers with a window forget at a time
NUM_ASKED = BLOCK  # newest positions from which rows may still be asked for, beside those that loops take back
NUM_UNWRITTEN = 1024  # positions that a checkpoint has still to write, in the usual case
ITEM_SIZES = {"bfloat16": 2, "float32": 4}
TOO_LONG = "longer_than_slot"  # the error code of a job that no slot of its worker has room for


class KVRoomError(UserError):
    """A key-value cache has no place."""


class TooLongError(KVRoomError):
    """A sequence is longer than any slot that a worker has: it has no place there however often it is tried."""


class PagesError(KVRoomError):
    """A sequence finds no page for its next positions: it has a place once others have left."""


def bytes_per_position(config: dict[str, Any], dtype: str, kv_dtype: KVDtype | None = None) -> int | None:
    """Count the bytes of one position in the cache of a text model; None where its config does not say."""
    if (latent := latent_sizes(config)) is not None:
        return int(config["num_hidden_layers"] * latent.entry_dim * ITEM_SIZES[dtype])
    num_heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or (hidden_size // num_heads if num_heads and hidden_size else None)
    if "qk_nope_head_dim" in config:  # latent attention of transformers' layers: `head_dim` is the rotary part alone
        head_dim = max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
    num_layers = num_attending_layers(config)
    if not (num_layers and num_kv_heads and head_dim):
        return None
    row_bytes = head_dim * ITEM_SIZES[dtype] if kv_dtype is None else head_dim + KV_SCALE_BYTES
    return int(2 * num_layers * num_kv_heads * row_bytes)


def state_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Count the bytes of the states that a sequence of a text model has; 0 where its layers have none."""
    shape = recurrent_shape(config)
    return 0 if shape is None else state_bytes_of(shape, ITEM_SIZES[dtype])


def state_bytes_of(shape: RecurrentShape, item_size: int) -> int:
    """The bytes of a sequence's states at most: at its end, at the boundary, of the steps between and of a tree's."""
    return 2 * shape.state_bytes + NUM_STEPS * shape.step_bytes(item_size)


@dataclass(frozen=True)
class HeldPositions:
    """The part of a text that a cache holds whose layers with a window forget what no row sees any more."""

    num_whole: int  # newest positions that all layers hold
    share: float  # of the bytes of a position further back that the other layers hold

    def of(self, num_positions: int, num_shared: int = 0) -> int:
        """Count the positions that would take as much memory in a cache that forgets nothing.

        The first `num_shared`, which others copy, are all held.
        """
        num_own = max(0, num_positions - num_shared)
        behind = max(0, num_own - self.num_whole)
        return num_positions - behind + math.ceil(self.share * behind)


def held_positions(windows: Windows, num_unwritten: int = NUM_UNWRITTEN) -> HeldPositions | None:
    """Return what caches of layers with these windows hold; None where all of them see all."""
    sizes = [size for size in windows if size is not None]
    if not sizes:
        return None
    return HeldPositions(max(sizes) + NUM_ASKED + FORGETS_EVERY + num_unwritten, 1 - len(sizes) / len(windows))


def held_of(config: dict[str, Any]) -> HeldPositions | None:
    """The same of a text model on a CPU, from its config."""
    return None if recurrent_shape(config) is not None else held_positions(kernel_windows(config))


# Counts the pages that caches take of a worker's memory while they grow. Without torch: the driver plans with them.


PAGE = 64  # positions; a CPU's memory is taken in less
GPU_PAGE = 256  # positions of a GPU's: of many short jobs each wastes half of one, and one look-up is a block's anyway
HORIZON = 2048  # tokens that a job has room for when it begins: to leave and to come back costs far less than these
ROOM_BEHIND = MAX_TREE_NODES + 1  # positions that a step may write behind the committed ones


class Growth(NamedTuple):
    """One job's positions: those that it has, those expected at its end, and first ones that others have as well."""

    now: int
    end: int
    num_shared: int = 0

    @property
    def left(self) -> int:
        return max(0, self.end - self.now)


class WindowPages(NamedTuple):
    """The pages of layers with a window, which have a pool of their own where caches forget."""

    num_pages: int
    held: HeldPositions  # that a job's pages are for


class PoolSize(NamedTuple):
    """The pool of pages that a GPU's caches lie in."""

    num_pages: int
    page: int = GPU_PAGE  # positions of a page
    windows: WindowPages | None = None  # beside it; None where all layers lie in the pool


def pages_of(num_positions: int, page: int | None = None) -> int:
    """The pages of a cache with so many committed positions, and room for a step behind them.

    `page` is the number of a page's positions, None on a CPU.
    """
    return -(-(num_positions + ROOM_BEHIND) // (page or PAGE))


def held_in_windows(windows: Windows, num_unwritten: int) -> HeldPositions | None:
    """Return the pages of layers with a window, if checkpoints lag by so much; None where no layer sees all.

    Beside what is asked for, kernels read all that the first row of a block sees, the first page may be lost in part,
    and a forward may read as many rows as it has.
    """
    sizes = [size for size in windows if size is not None]
    if not sizes or len(sizes) == len(windows):
        return None
    num_behind = ROW_CHOICES[-1] - ROOM_BEHIND
    return HeldPositions(max(sizes) + BLOCK + NUM_ASKED + GPU_PAGE + num_behind + num_unwritten, 0.0)


def most_pages(jobs: Iterable[Growth], page: int | None = None, held: HeldPositions | None = None) -> int:
    """The most pages that jobs take within the horizon if they grow alike, and each leaves at its expected end.

    That time is one of the ends, or the horizon: a job's pages are free again when it has left, and until then all
    others grow. What lies behind the horizon is left open: by then some have ended, or the youngest makes room.
    Caches hold what `held` says of their positions, without it all.
    """
    page = page or PAGE
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


def has_window_pages(jobs: Collection[Growth], page: int, windows: WindowPages | None) -> bool:
    """Tell whether layers with a window have pages enough for jobs, as `most_pages` counts; so without such a pool."""
    if windows is None:
        return True
    own = [job._replace(num_shared=0) for job in jobs]  # what is held for others gives way
    at_their_ends = sum(windows.held.of(job.end) + ROOM_BEHIND + page - 1 for job in own)
    return at_their_ends <= windows.num_pages * page or most_pages(own, page, windows.held) <= windows.num_pages
