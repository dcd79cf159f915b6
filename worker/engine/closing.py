"""Closes a thought where the text would end within it: the closing marker comes there, and the answer behind it."""

from __future__ import annotations

from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.engine.stopping import LENGTH, REPETITION, STOP


def closed(sequence: Sequence, thinking: Thinking | None) -> Sequence | None:
    """An ended sequence with its thought closed, which goes on; None where it is to end as it has.

    The marker stands in the place of the end-of-sequence token, or behind a loop. It is put there, not drawn. What
    comes behind it is drawn as ever, so all of it is a function of the job, whoever resumes it. A thought is closed
    where there is room for the marker and for one more token.
    """
    output_ids = _with_marker(sequence, thinking)
    if output_ids is None or len(output_ids) >= sequence.sampling.max_tokens:
        return None
    return sequence.with_output(output_ids)


def may_be_extended(sequence: Sequence, thinking: Thinking | None) -> bool:
    """Return whether `max_tokens` alone ended a sequence: with more of them it would have gone on.

    That also holds where its thought would have been closed, had there been room for it.
    """
    if sequence.finish_reason == LENGTH:
        return True
    output_ids = _with_marker(sequence, thinking)
    return output_ids is not None and len(output_ids) >= sequence.sampling.max_tokens


def _with_marker(sequence: Sequence, thinking: Thinking | None) -> list[int] | None:
    """The output of an ended sequence with its thought closed; None where it has none that is to be closed."""
    if thinking is None or not _is_to_close(sequence):
        return None
    output_ids = sequence.output_ids[:-1] if sequence.finish_reason == STOP else sequence.output_ids
    thought = thinking.in_output(output_ids.tolist())
    marker = thinking.markers.end[thought.num_matched :] if thought.is_open else ()
    return [*output_ids.tolist(), *marker] if marker else None


def _is_to_close(sequence: Sequence) -> bool:
    """Return whether its job asks for that where it has ended."""
    params = sequence.sampling
    if sequence.finish_reason == STOP:
        is_end = int(sequence.output_ids[-1]) in sequence.eos_token_ids and not params.ignore_eos
        return params.thinking_end == "close" and is_end
    detection = params.repetition_detection
    return sequence.finish_reason == REPETITION and detection is not None and detection.action == "close"
