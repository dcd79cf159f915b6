"""The text of output tokens from their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from swiftbatch.worker.texts.byte_stream import ByteStream
from swiftbatch.worker.texts.decoder_steps import DecoderSteps
from swiftbatch.worker.texts.stop_strings import StreamSearch
from swiftbatch.worker.texts.token_bytes import TokenBytes
from swiftbatch.worker.texts.utf8 import continues, settled_characters


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

    def search(self, stop: tuple[str, ...], min_tokens: int, token_ids: Sequence[int]) -> StreamSearch:
        return StreamSearch(stop, self._stream(), token_ids)

    def _stream(self) -> ByteStream:
        return ByteStream(self._tokens, self._steps)
