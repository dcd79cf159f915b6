"""Free memory of the machine, of a folder and of a GPU, without torch."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swiftbatch.worker.kv.kv_capacity import GB, HeldPositions, KVRoomError

if TYPE_CHECKING:
    import torch

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


def place_of_caches(device: str, kv_offload: str | None) -> str | None:
    """Return the folder of the caches, or `MEMORY` for the host's memory, or None for a GPU's own memory."""
    if device == "cpu":
        return kv_offload or MEMORY
    return MEMORY if kv_offload else None


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
