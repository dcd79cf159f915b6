"""When a generation ends: end-of-sequence or stop token, stop string, its last token, or a loop; and its text then."""

from __future__ import annotations

from collections.abc import Callable

from worker.repetition import LoopDetector, first_repetition
from worker.sequence import Sequence

LENGTH, STOP, REPETITION, ERROR = "length", "stop", "repetition", "error"


class StopRule:
    """Decides after each committed token; sees tokens one by one, so it never depends on how many a step commits."""

    def __init__(
        self, sequence: Sequence, eos_token_ids: frozenset[int], decode: Callable[[list[int]], str] | None = None
    ) -> None:
        params = sequence.sampling
        if params.stop and decode is None:
            raise ValueError("stop strings need a tokenizer to decode with")
        ending = frozenset() if params.ignore_eos else eos_token_ids
        self._ending_token_ids = ending.union(params.stop_token_ids)
        self._stop = params.stop
        self._decode = decode
        # A byte-level token is at least one byte, so this many tokens cover the longest stop string.
        self._num_kept = max((len(text.encode()) for text in self._stop), default=0) + 8
        self._tail = sequence.output_ids[-self._num_kept :].tolist()
        self._num_remaining = sequence.num_remaining_tokens
        self._num_before_stop = params.min_tokens - sequence.num_generated_tokens  # tokens, at this end or in front
        detection = params.repetition_detection
        self._loops = LoopDetector(detection, sequence.output_ids) if detection is not None else None

    def after(self, token_id: int) -> str | None:
        """Return the finish reason if `token_id`, committed now, ends the sequence, else None."""
        self._num_remaining -= 1
        self._num_before_stop -= 1
        self._tail = [*self._tail, token_id][-self._num_kept :]
        if self._loops is not None:
            self._loops.push(token_id)
        return self.now()

    def now(self) -> str | None:
        """Return the finish reason if the last output token ends the sequence, else None (also without output)."""
        if not self._tail:
            return None
        if self._num_before_stop < 0 and (self._tail[-1] in self._ending_token_ids or self._has_stop_string()):
            return STOP
        if self._num_remaining <= 0:
            return LENGTH
        return REPETITION if self._loops is not None and self._num_before_stop <= 0 and self._loops.is_loop() else None

    def _has_stop_string(self) -> bool:
        if not self._stop or self._decode is None:
            return False
        num_before = len(self._tail) + self._num_before_stop  # of the tail, in which no stop string may end
        before = self._decode(self._tail[:num_before]) if num_before > 0 else ""
        return first_stop(self._decode(self._tail), self._stop, len(before)) is not None


def may_rewind(sequence: Sequence) -> bool:
    """Whether it has ended in a loop and is to go back. Not at temperature 0: the same tokens would come again."""
    detection = sequence.sampling.repetition_detection
    if sequence.finish_reason != REPETITION or detection is None or sequence.sampling.temperature == 0.0:
        return False
    return detection.action == "rewind" and len(sequence.rewinds) < detection.max_rewinds


def rewound(sequence: Sequence) -> Sequence:
    """A sequence that `may_rewind` without its loop's repetitions, for `Engine.rewind`."""
    detection = sequence.sampling.repetition_detection
    assert detection is not None
    return sequence.rewound(first_repetition(detection, sequence.output_ids))


def first_stop(text: str, stop: tuple[str, ...], num_before: int = 0) -> tuple[int, int] | None:
    """Start and end of the first stop string that does not end within the first characters; None without one."""
    found = [(text.find(each, max(0, num_before - len(each) + 1)), each) for each in stop]
    return min(((start, start + len(each)) for start, each in found if start >= 0), default=None)


def text_of(sequence: Sequence, decode: Callable[[list[int]], str]) -> str:
    """The output's text, without what ended it where that was a stop token or string and is not asked for."""
    params, output_ids = sequence.sampling, sequence.output_ids.tolist()
    is_stopped = sequence.finish_reason == STOP and len(output_ids) > params.min_tokens
    if is_stopped and output_ids[-1] in params.stop_token_ids:
        return decode(output_ids if params.include_stop_str_in_output else output_ids[:-1])
    text = decode(output_ids)
    before = decode(output_ids[: params.min_tokens]) if params.stop and params.min_tokens else ""
    if found := first_stop(text, params.stop, len(before)):
        return text[: found[params.include_stop_str_in_output]]
    return text
