"""Keys and values of the prompts that a worker read last, in the host's memory, for jobs to come that begin alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.caches.room import MEMORY, KVRoom

MEMORY_SHARE = 1 / 8  # of what would be free without them


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """A prompt's first tokens and their keys and values; a `KVSource` of its own."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    num_shared: int  # first ones that other jobs are known to have
    rows: NDArray[Any]  # [num_rows, num_tokens, head_dim], as `FullKVCache.kv` has them

    def kv(self, start: int, end: int) -> NDArray[Any]:
        return self.rows[:, start:end]


class KeptPrefixes:
    """Keeps a few prefixes, within an eighth of the memory that is free without them; drops the least recently used."""

    def __init__(self, bytes_per_position: int, free_bytes: Callable[[], float] | None = None) -> None:
        """`free_bytes` says what the memory has left, None for this machine's."""
        self._bytes_per_position = bytes_per_position
        self._free_bytes = free_bytes or KVRoom(MEMORY, bytes_per_position).free_bytes
        self._prefixes: list[KeptPrefix] = []  # the newest use last

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys and values."""
        return sum(prefix.rows.nbytes for prefix in self._prefixes)

    def longest(self, token_ids: NDArray[np.int64]) -> tuple[KeptPrefix | None, int]:
        """The one that has most of the first of these tokens, and how many."""
        found = [(num_alike(prefix.token_ids, token_ids), prefix) for prefix in self._prefixes]
        num_tokens, best = max(found, key=lambda pair: pair[0], default=(0, None))
        return best, num_tokens

    def use(self, prefix: KeptPrefix) -> None:
        """Note that a prefix was of use."""
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)

    def keep(self, token_ids: NDArray[np.int64], num_shared: int, cache: FullKVCache) -> None:
        """Keep what a cache has of some first tokens, if that has room; one that has those shared already is enough."""
        best, num_known = self.longest(token_ids)
        if best is not None and num_known >= num_shared:
            self.use(best)
            return
        self._prefixes = [each for each in self._prefixes if num_alike(each.token_ids, token_ids) < each.num_shared]
        num_bytes = len(token_ids) * self._bytes_per_position
        if num_bytes <= self._limit():
            self._drop_down_to(self._limit() - num_bytes)
            self._prefixes.append(KeptPrefix(token_ids.copy(), num_shared, np.array(cache.kv(0, len(token_ids)))))

    def trim(self) -> None:
        """Give memory back that others need by now."""
        self._drop_down_to(self._limit())

    def clear(self) -> bool:
        """Give all memory back; return whether there was any."""
        had_some = bool(self._prefixes)
        self._prefixes.clear()
        return had_some

    def _limit(self) -> float:
        return MEMORY_SHARE * (self._free_bytes() + self.num_bytes)

    def _drop_down_to(self, num_bytes: float) -> None:
        while self._prefixes and self.num_bytes > num_bytes:
            del self._prefixes[0]


def num_alike(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Count the tokens that are the same, from the first on."""
    num_tokens = min(len(one), len(other))
    differs = one[:num_tokens] != other[:num_tokens]
    first = int(differs.argmax()) if num_tokens else 0
    return first if num_tokens and differs[first] else num_tokens
