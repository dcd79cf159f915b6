"""The text of output tokens from a tokenizer's own `decode`, where single tokens have no bytes that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swiftbatch.worker.texts.stop_strings import PrefixSearch

BROKEN_CHARACTER = "\ufffd"  # what a tokenizer makes of a character whose last bytes are yet to come


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

    def search(self, stop: tuple[str, ...], min_tokens: int, token_ids: Sequence[int]) -> PrefixSearch:
        return PrefixSearch(stop, min_tokens, self.settled, token_ids)
