"""The text of output tokens, which all that shows, cuts, counts or stops a text goes by.

It comes from the tokens' bytes; where single tokens have no bytes that are known, from a tokenizer's own `decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from swiftbatch.worker.text.text_search import PrefixSearch, StreamSearch
from swiftbatch.worker.text.token_bytes import ByteStream, DecoderSteps, TokenBytes, continues, settled_characters

BROKEN_CHARACTER = "\ufffd"  # what a tokenizer makes of a character whose last bytes are yet to come


class StopSearch(Protocol):
    """The search for stop strings behind some output tokens."""

    def push(self, token_id: int) -> bool:
        """Go on behind one more token; return whether a stop string is whole now, and was not before it."""

    def skip(self, token_id: int) -> None:
        """Go on behind one more token; no stop string begins within the text up to there."""


class OutputText(Protocol):
    """The text that tokens of an output come to.

    It is the concatenated bytes of the tokens that are not special, by the rules of the tokenizer's decoder, decoded as
    UTF-8 with `errors="replace"`. These rules say what stands for a space, which tokens are bytes, what is left out in
    front of the first token, and at the start. For complete characters that is what `tokenizer.decode` gives, without
    special tokens. What of a character is not complete is one U+FFFD, as in Python, and takes nothing else with it:
    the `tokenizers` library would lose all bytes of a run where one is missing.

    The text is settled as far as no token to come can change it: without the first bytes of a character whose others
    are missing. A stop string comes with the token behind which the settled text has it. A stop string with U+FFFD
    finds those that are settled, so it comes with the token that shows that a character stays incomplete.

    A tokenizer whose decoder can't be said of single tokens (a step that is not known) has the text that its own
    `decode` makes of all tokens up to each place; settled is that without U+FFFD at its end.
    """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an output."""

    def settled(self, token_ids: Sequence[int]) -> str:
        """The text of an output as far as it stays, whatever comes behind."""

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Count the characters of the text in front of each token and, last, of all of it.

        A token that begins within a character has the place of this character. One without bytes has the place of the
        next that has some.
        """

    def search(
        self, stop: tuple[str, ...], min_tokens: int, token_ids: Sequence[int], num_skipped: int = 0
    ) -> StopSearch:
        """A search behind these tokens for strings that do not end within the text of the first `min_tokens`.

        Strings that do may be told of as well, with the token that they end with. The first `num_skipped` tokens count
        as skipped.
        """


class ByteText:
    """An `OutputText`."""

    def __init__(self, tokens: TokenBytes, steps: DecoderSteps) -> None:
        self._tokens, self._steps = tokens, steps

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._stream().parts(token_ids)).decode(errors="replace")

    def settled(self, token_ids: Sequence[int]) -> str:
        return self._stream().feed(token_ids)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        places: list[int] = []
        num_empty, length, pending = 0, 0, b""  # tokens without bytes that were last, settled characters, bytes behind
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
        return StreamSearch(stop, self._stream(), token_ids, num_skipped)

    def _stream(self) -> ByteStream:
        return ByteStream(self._tokens, self._steps)


class LibraryText:
    """An `OutputText`. It decodes all of the text for each place: that is slow, and right whatever `decode` does."""

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
