"""Search for stop strings in a text, and for the token that completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from swiftbatch.worker.text.token_bytes import ByteStream


def first_stop(text: str, stop: tuple[str, ...], num_before: int = 0, first: int = 0) -> tuple[int, int] | None:
    """Return start and end of the first stop string that starts at `first` or later.

    It ends after the first `num_before` characters.
    """
    found = [(text.find(each, max(first, num_before - len(each) + 1)), each) for each in stop]
    return min(((start, start + len(each)) for start, each in found if start >= 0), default=None)


class StreamSearch:
    """Search in arriving characters; it holds back those that may start a stop string."""

    def __init__(self, stop: tuple[str, ...], stream: ByteStream, token_ids: Sequence[int], num_skipped: int) -> None:
        """Push `token_ids` to a fresh `stream`; the first `num_skipped` count as skipped."""
        self._stop, self._stream = stop, stream
        self._num_kept = max(map(len, stop)) - 1
        stream.feed(token_ids[:num_skipped])
        self._tail = self._last(stream.feed(token_ids[num_skipped:]))

    def push(self, token_id: int) -> bool:
        characters = self._stream.push(token_id)
        if not characters:
            return False
        num_before, text = len(self._tail), self._tail + characters
        self._tail = self._last(text)
        return first_stop(text, self._stop, num_before) is not None

    def skip(self, token_id: int) -> None:
        self._stream.push(token_id)
        self._tail = ""

    def _last(self, text: str) -> str:
        return text[max(0, len(text) - self._num_kept) :]


class PrefixSearch:
    """Search in the whole text after each token, for texts that any token may change."""

    def __init__(
        self,
        stop: tuple[str, ...],
        min_tokens: int,
        settled: Callable[[Sequence[int]], str],
        token_ids: Sequence[int],
        num_skipped: int,
    ) -> None:
        self._stop, self._min_tokens, self._settled = stop, min_tokens, settled
        self._token_ids, self._num_skipped = list(token_ids), num_skipped

    def push(self, token_id: int) -> bool:
        self._token_ids.append(token_id)
        if len(self._token_ids) <= self._min_tokens:
            return False
        first = len(self._settled(self._token_ids[: self._num_skipped]))
        return first_stop(self._settled(self._token_ids), self._stop, self._num_before, first) is not None

    def skip(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._num_skipped = len(self._token_ids)

    @cached_property
    def _num_before(self) -> int:
        return len(self._settled(self._token_ids[: self._min_tokens]))
