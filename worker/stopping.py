"""When a generation ends: end-of-sequence token, stop string, or its last token."""

from __future__ import annotations

from collections.abc import Callable

from worker.sequence import Sequence

LENGTH, STOP, ERROR = "length", "stop", "error"


class StopRule:
    """Decides after each committed token; sees tokens one by one, so it never depends on how many a step commits."""

    def __init__(
        self, sequence: Sequence, eos_token_ids: frozenset[int], decode: Callable[[list[int]], str] | None = None
    ) -> None:
        params = sequence.sampling
        if params.stop and decode is None:
            raise ValueError("stop strings need a tokenizer to decode with")
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop = params.stop
        self._decode = decode
        # A byte-level token is at least one byte, so this many tokens cover the longest stop string.
        self._num_kept = max((len(text.encode()) for text in self._stop), default=0) + 8
        self._tail = sequence.output_ids[-self._num_kept :].tolist()
        self._num_remaining = sequence.num_remaining_tokens

    def after(self, token_id: int) -> str | None:
        """Return the finish reason if `token_id`, committed now, ends the sequence, else None."""
        self._num_remaining -= 1
        self._tail = [*self._tail, token_id][-self._num_kept :]
        return self.now()

    def now(self) -> str | None:
        """Return the finish reason if the last output token ends the sequence, else None (also without output)."""
        if not self._tail:
            return None
        if self._tail[-1] in self._eos_token_ids or self._has_stop_string():
            return STOP
        return LENGTH if self._num_remaining <= 0 else None

    def _has_stop_string(self) -> bool:
        if not self._stop or self._decode is None:
            return False
        text = self._decode(self._tail)
        return any(stop in text for stop in self._stop)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Text before the first stop string; the whole text where there is none."""
    starts = [start for start in (text.find(s) for s in stop) if start >= 0]
    return text[: min(starts)] if starts else text
