"""Free memory: of this machine within its container's limit, in a folder, and on a GPU (without torch)."""

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
OWN_GROUP = Path("/sys/fs/cgroup")  # a container's own, as it sees it
EMPTY_SHARE = 0.97  # of a GPU's memory, free: nobody else has any
STILL_SECONDS, MOST_SETTLING_SECONDS = 2.0, 30.0  # without a rise of free memory; of waiting for that
POLL_SECONDS = 0.1


def check_folder(kv_offload: str | None) -> None:
    """Raise KVRoomError where that is no folder, or one in which no file can be made."""
    if kv_offload is None:
        return
    try:
        tempfile.TemporaryFile(dir=kv_offload).close()
    except OSError as error:
        raise KVRoomError(
            f"--kv-offload {kv_offload}: {error.strerror or error}; expected a folder that can be written"
        ) from None


def place_of_caches(device: str, kv_offload: str | None) -> str | None:
    """The folder that caches lie in, or `MEMORY`; None for a GPU's own memory, which nobody here knows."""
    if device == "cpu":
        return kv_offload or MEMORY
    return MEMORY if kv_offload else None


@dataclass(frozen=True)
class KVRoom:
    """A place of caches, and what they take there."""

    place: str  # a folder, or `MEMORY`
    bytes_per_position: int
    state_bytes: int = 0  # of a cache, whatever its length
    held: HeldPositions | None = None  # None where caches forget nothing

    def refuse_too_long(self, num_positions: int, num_held: int = 0) -> None:
        """Raise KVRoomError where a cache of so many positions takes more than is left, and more than others hold."""
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
        """Bytes that are left in the folder's file system, or those that programs may still take of the memory."""
        if self.place != MEMORY:
            return shutil.disk_usage(self.place).free
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        [kibibytes] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        return min(kibibytes * 1024, _left_in_group(OWN_GROUP))


def _left_in_group(folder: Path) -> float:
    """Bytes that a container may still take, whose limit is its control group's (version 2); infinity without one."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))  # or the word max
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return math.inf
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))  # the page cache gives way


def settled_free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU once no more come free: a worker that was killed gives its memory back late."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    risen = started = time.monotonic()
    while free < EMPTY_SHARE * total and time.monotonic() < min(risen + STILL_SECONDS, started + MOST_SETTLING_SECONDS):
        time.sleep(POLL_SECONDS)
        before, free = free, torch.cuda.mem_get_info(device)[0]
        risen = time.monotonic() if free > before else risen
    return int(free)
