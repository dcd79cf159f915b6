"""Text of output tokens, from their bytes, or by the tokenizer's `decode` if bytes of tokens are unknown.

Stop strings are searched in it, and the token that completes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from swiftbatch.worker.text.token_bytes import ByteStream, DecoderSteps, TokenBytes, continues, settled_characters

BROKEN_CHARACTER = "\ufffd"  # stands for an incomplete character


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
        """Add a token; no stop string begins before its end."""
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


class ByteText:
    """Text of output tokens: the bytes of non-special ones, decoded as UTF-8 with `errors="replace"`.

    An incomplete character is a single U+FFFD; the `tokenizers` library would drop the whole run of bytes. The settled
    text is the part that no later token can change. A stop string matches at the first token whose settled text has it.
    """

    def __init__(self, tokens: TokenBytes, steps: DecoderSteps) -> None:
        self._tokens, self._steps = tokens, steps

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._stream().parts(token_ids)).decode(errors="replace")

    def settled(self, token_ids: Sequence[int]) -> str:
        """Return the part of an output's text that later tokens cannot change."""
        return self._stream().feed(token_ids)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return the number of characters before each token and, last, in the whole text.

        A token within a character has the character's offset.
        """
        places: list[int] = []
        num_empty, length, pending = 0, 0, b""  # last tokens without bytes, settled characters, pending bytes
        for part in self._stream().parts(token_ids):
            if not part:
                num_empty += 1
                continue
            begins_anew = bool(pending) and not continues(pending, part[:1])
            places += [length + begins_anew] * (num_empty + 1)
            text, num_used = settled_characters(pending + part)
            num_empty, length, pending = 0, length + len(text), (pending + part)[num_used:]
        return places + [length + bool(pending)] * (num_empty + 1)

    def search(
        self, stop: tuple[str, ...], min_tokens: int, token_ids: Sequence[int], num_skipped: int = 0
    ) -> StreamSearch:
        """Return a search after these tokens for strings that end after the text of the first `min_tokens`."""
        return StreamSearch(stop, self._stream(), token_ids, num_skipped)

    def _stream(self) -> ByteStream:
        return ByteStream(self._tokens, self._steps)


class LibraryText:
    """Text by `decode` of all tokens at each place: slow, and right for every tokenizer.

    U+FFFD at its end is not settled.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(list(token_ids))

    def settled(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids).rstrip(BROKEN_CHARACTER)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        places = [len(self.settled(token_ids[:end])) for end in range(len(token_ids))]
        return [*places, len(self.decode(token_ids))]

    def search(
        self, stop: tuple[str, ...], min_tokens: int, token_ids: Sequence[int], num_skipped: int = 0
    ) -> PrefixSearch:
        return PrefixSearch(stop, min_tokens, self.settled, token_ids, num_skipped)


OutputText = ByteText | LibraryText
