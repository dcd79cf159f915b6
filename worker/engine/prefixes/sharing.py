"""Lets one of a worker's sequences read the tokens that several begin with; the others copy keys and values.

Keys and values at a position follow from the tokens up to there alone, whatever shared their forward: so the copies are
what a sequence would have read itself, bit for bit, and all that drafters make of a cache they make of a copied one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.caches.full import CacheSource
from swiftbatch.worker.engine.prefixes.kept import KeptPrefix, KeptPrefixes, num_alike
from swiftbatch.worker.engine.slot import Slot

SHORTEST = 64  # tokens; fewer are read as soon as copied


@dataclass
class _Member:
    """A sequence of the engine."""

    slot: Slot
    token_ids: NDArray[np.int64]  # that it came with, but for the last
    num_alike: dict[str, int] = field(default_factory=dict)  # first tokens that another has as well, by its name


class Sharing:
    """Knows which of an engine's sequences have read what others lack, and which wait for others.

    A sequence waits only for those that came before it, so the first always goes on.
    """

    def __init__(self, kept: KeptPrefixes) -> None:
        self.kept = kept
        self._members: dict[str, _Member] = {}  # in the order in which they came

    def join(self, slot: Slot) -> None:
        """Take a sequence in."""
        new = _Member(slot, slot.sequence.token_ids[:-1])
        for name, other in self._members.items():
            if (num_tokens := num_alike(new.token_ids, other.token_ids)) >= SHORTEST:
                new.num_alike[name] = other.num_alike[slot.sequence.sequence_id] = num_tokens
        self._members[slot.sequence.sequence_id] = new

    def leave(self, slot: Slot) -> None:
        """Forget a sequence."""
        del self._members[slot.sequence.sequence_id]
        for other in self._members.values():
            other.num_alike.pop(slot.sequence.sequence_id, None)

    def keep(self, slot: Slot) -> None:
        """Keep what a sequence that is about to leave has read for others, where none of those here has it too."""
        own = self._members[slot.sequence.sequence_id]
        num_shared = min(slot.num_shared_tokens, slot.cache.length, len(own.token_ids))
        if num_shared < SHORTEST or any(self._holds(own, name, num_shared) for name in own.num_alike):
            return
        end = min(num_shared + SHORTEST, slot.cache.length, len(own.token_ids))  # others may part a little later
        self.kept.keep(own.token_ids[:end], num_shared, slot.cache)

    def waits(self, slot: Slot) -> bool:
        """Return whether a sequence that came before is still reading tokens that the slot lacks as well."""
        own, length = self._members[slot.sequence.sequence_id], slot.cache.length
        for name, other in self._members.items():
            if other is own:
                break
            num_tokens = own.num_alike.get(name, 0)
            is_reading = other.slot.sequence.finish_reason is None and other.slot.cache.length < num_tokens
            if is_reading and num_tokens - length >= SHORTEST:
                return True
        return False

    def take_over(self, slot: Slot) -> int:
        """Copy what is there of the tokens that the slot lacks; returns how many."""
        start = slot.cache.length
        if slot.num_unread < SHORTEST:
            return 0
        source, end = max(self._sources(slot), key=lambda pair: pair[1])
        if source is None or end - start < SHORTEST:
            return 0
        slot.cache.copy_from(source, end)
        if isinstance(source, KeptPrefix):
            self.kept.use(source)
        return end - start

    def _sources(self, slot: Slot) -> Iterator[tuple[CacheSource | None, int]]:
        """Yield each source of a sequence's first tokens, and how many it has."""
        own = self._members[slot.sequence.sequence_id]
        yield self.kept.longest(own.token_ids)
        for name, num_tokens in own.num_alike.items():
            cache = self._members[name].slot.cache
            yield cache, min(num_tokens, cache.length)

    def _holds(self, own: _Member, name: str, num_tokens: int) -> bool:
        """Return whether another sequence has so many first tokens of one in its cache, and keeps them in its turn."""
        other = self._members[name].slot
        return min(own.num_alike[name], other.num_shared_tokens, other.cache.length) >= num_tokens
