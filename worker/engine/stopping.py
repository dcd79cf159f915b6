"""Ends a generation at a stop token or string, its last token, or a loop; cuts its text and closes its thought."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from swiftbatch.jobs.job import Job
from swiftbatch.jobs.run.output_line import Reasoning, ToolCalls
from swiftbatch.jobs.sampling_params import ALONE, RepetitionDetection, SamplingParams
from swiftbatch.worker.constraints.thinking import Thinking, reasoning_of
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.output_text import OutputText, first_stop
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.text.tool_calls import calls_in

LENGTH, STOP, REPETITION, ERROR = "length", "stop", "repetition", "error"
ROOM = 4096  # tokens between two moves of a loop detector's window


class StopRule:
    """Decides after each committed token, so that the end depends on the output alone, not on steps or resumes."""

    def __init__(
        self, sequence: Sequence, output_text: OutputText | None = None, thinking: Thinking | None = None
    ) -> None:
        """`thinking` is None for an output without a thought."""
        self.thinking = thinking
        params, output_ids = sequence.sampling, sequence.output_ids.tolist()
        self._ending_token_ids = ending_tokens(sequence)
        self._last = output_ids[-1] if output_ids else None
        self._search, self._has_stop_string = None, False  # the latter: a stop string ends with the last token
        if params.stop:
            if output_text is None:
                raise ValueError("stop strings need a tokenizer to decode with")
            self._search = _StopStrings(params, output_text, thinking, output_ids[:-1])
            self._has_stop_string = self._last is not None and self._search.push(self._last)
        self._num_remaining = sequence.num_remaining_tokens
        self._num_before_stop = params.min_tokens - sequence.num_generated_tokens  # tokens until a stop counts
        detection = params.repetition_detection
        self._loops = LoopDetector(detection, sequence.output_ids) if detection is not None else None

    @property
    def looks_back(self) -> bool:
        """Return whether the end may depend on more than the newest token: on a stop string or a loop."""
        return self._search is not None or self._loops is not None

    def after(self, token_id: int) -> str | None:
        """Return the finish reason if `token_id`, committed now, ends the sequence, else None."""
        self._num_remaining -= 1
        self._num_before_stop -= 1
        self._last = token_id
        if self._num_remaining > 0 and token_id not in self._ending_token_ids and not self.looks_back:
            return None  # asked for each token; this is the most common answer
        if self._search is not None:
            self._has_stop_string = self._search.push(token_id)
        if self._loops is not None:
            self._loops.push(token_id)
        return self.now()

    def now(self) -> str | None:
        """Return the finish reason if the last output token, if any, ends the sequence, else None."""
        if self._last is None:
            return None
        if self._num_before_stop < 0 and (self._last in self._ending_token_ids or self._has_stop_string):
            return STOP
        if self._num_remaining <= 0:
            return LENGTH
        return REPETITION if self._loops is not None and self._num_before_stop <= 0 and self._loops.is_loop() else None


class _StopStrings:
    """Search for stop strings in an output. Within a thought, stop strings for the answer alone are ignored."""

    def __init__(
        self, params: SamplingParams, output_text: OutputText, thinking: Thinking | None, output_ids: list[int]
    ) -> None:
        anywhere, in_answer = _stop_strings(params, thinking)
        self._anywhere = output_text.search(anywhere, params.min_tokens, output_ids) if anywhere else None
        self._thought = thinking.in_output(output_ids) if thinking is not None and in_answer else None
        if self._thought is not None:
            num_skipped = self._thought.num_before_answer
            self._in_answer = output_text.search(in_answer, params.min_tokens, output_ids, num_skipped)

    def push(self, token_id: int) -> bool:
        """Append one token to the searched text; return whether a stop string ends with this token."""
        is_found = self._anywhere is not None and self._anywhere.push(token_id)
        if self._thought is None:
            return is_found
        self._thought.push(token_id)
        if self._thought.num_before_answer < len(self._thought):
            return self._in_answer.push(token_id) or is_found
        self._in_answer.skip(token_id)
        return is_found


def _stop_strings(params: SamplingParams, thinking: Thinking | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two groups of stop strings: those with a marker count anywhere, the others only in the answer."""
    if thinking is None or params.stop_in_reasoning:
        return params.stop, ()
    markers = [marker for marker in thinking.markers.texts if marker]
    anywhere = tuple(each for each in params.stop if any(marker in each for marker in markers))
    return anywhere, tuple(each for each in params.stop if each not in anywhere)


def may_rewind(sequence: Sequence) -> bool:
    """Return whether a sequence ended in a loop and may rewind; at temperature 0 the same loop would come again."""
    detection = sequence.sampling.repetition_detection
    if sequence.finish_reason != REPETITION or detection is None or sequence.sampling.temperature == 0.0:
        return False
    return detection.action == "rewind" and len(sequence.rewinds) < detection.max_rewinds


def rewind_distance(sequence: Sequence) -> int:
    """Return roughly the largest number of tokens that a rewind drops, or 0 if the job does not rewind."""
    detection = sequence.sampling.repetition_detection
    if detection is None or not detection.is_on or detection.action != "rewind":
        return 0
    return detection.max_pattern_size * detection.min_count


def rewound(sequence: Sequence) -> Sequence:
    """Return a sequence that `may_rewind` without its loop's repetitions, for `Engine.rewind`."""
    detection = sequence.sampling.repetition_detection
    assert detection is not None
    return sequence.rewound(first_repetition(detection, sequence.output_ids))


def ending_tokens(sequence: Sequence) -> frozenset[int]:
    params = sequence.sampling
    return (frozenset() if params.ignore_eos else sequence.eos_token_ids).union(params.stop_token_ids)


def text_of(sequence: Sequence, output_text: OutputText, thinking: Thinking | None = None) -> str:
    """Return the output's text, without an ending stop token or string unless the job asks for it."""
    params, output_ids = sequence.sampling, sequence.output_ids.tolist()
    is_stopped = sequence.finish_reason == STOP and len(output_ids) > params.min_tokens
    if is_stopped and output_ids[-1] in ending_tokens(sequence):
        return output_text.decode(output_ids if params.include_stop_str_in_output else output_ids[:-1])
    if params.stop:  # an incomplete character is no text
        text, before = output_text.settled(output_ids), output_text.settled(output_ids[: params.min_tokens])
        anywhere, in_answer = _stop_strings(params, thinking)
        found = [first_stop(text, anywhere, len(before))]
        if in_answer and thinking is not None:
            thought = output_text.settled(output_ids[: thinking.in_output(output_ids).num_before_answer])
            found.append(first_stop(text, in_answer, len(before), len(thought)))
        if place := min(filter(None, found), default=None):
            return text[: place[params.include_stop_str_in_output]]
    return output_text.decode(output_ids)


class Answer(NamedTuple):
    """Text of an output, its thought if the model thinks, and its calls if there are any."""

    text: str
    reasoning: Reasoning | None
    calls: ToolCalls | None = None


def answer_of(sequence: Sequence, job: Job, codec: TextCodec, thinking: Thinking | None) -> Answer:
    """Return what an ended job's result shows."""
    text, reasoning = _text_and_thought(sequence, codec.output_text, thinking)
    if job.sampling.echo:
        text = echo_of(job, sequence.token_ids[: sequence.num_prompt_tokens].tolist(), codec) + (
            "" if job.sampling.echo == ALONE else text
        )
    if job.template is None or not job.template.tools or codec.call_form is None:
        return Answer(text, reasoning)
    marked, thought = _text_and_thought(sequence, codec.marked_text, thinking)
    said = marked if thought is None else thought.content
    return Answer(text, reasoning, calls_in(codec.call_form, said, job.template.tools, sequence.sequence_id))


def echo_of(job: Job, prompt_ids: list[int], codec: TextCodec) -> str:
    """Return the prompt's text that stands before a job's output, or nothing if the job does not ask for it."""
    if not job.sampling.echo:
        return ""
    is_whole = job.prompt is not None and job.sampling.truncate_prompt_tokens is None
    return str(job.prompt) if is_whole else codec.decode(prompt_ids)


def _text_and_thought(
    sequence: Sequence, output_text: OutputText, thinking: Thinking | None
) -> tuple[str, Reasoning | None]:
    text = text_of(sequence, output_text, thinking)
    return text, reasoning_of(sequence, text, thinking, output_text.offsets)


class LoopDetector:
    """For every pattern size, the last output token that differed from the one `size` tokens before it.

    The output ends with `min_count` repetitions of a pattern once `size * (min_count - 1)` tokens follow that token.
    All arrays `[num_sizes]` have the sizes in descending order.
    """

    def __init__(self, detection: RepetitionDetection, output_ids: np.ndarray) -> None:
        most, least = detection.max_pattern_size, detection.smallest_pattern
        sizes = np.arange(most, least - 1, -1)
        self._num_tokens = len(output_ids)
        self._needed = sizes * (detection.min_count - 1)
        self._last_others = np.array([self._num_tokens - _num_alike(output_ids, size) for size in sizes.tolist()])
        self._differs = np.empty(len(sizes), dtype=bool)
        self._earliest = 0  # no loop ends in front of so many tokens
        self._window = np.full(most + ROOM, -1, dtype=np.int64)  # -1 is no token
        self._end, self._most, self._least = most, most, least
        last = output_ids[-most:]
        self._window[most - len(last) : most] = last

    def push(self, token_id: int) -> None:
        if self._end == len(self._window):
            self._window[: self._most] = self._window[-self._most :]
            self._end = self._most
        self._num_tokens += 1
        before = self._window[self._end - self._most : self._end - self._least + 1]
        np.putmask(self._last_others, np.not_equal(before, token_id, out=self._differs), self._num_tokens)
        self._window[self._end] = token_id
        self._end += 1

    def is_loop(self) -> bool:
        if self._num_tokens >= self._earliest:  # the needed number only grows
            self._earliest = int((self._last_others + self._needed).min())
        return self._num_tokens >= self._earliest


def first_repetition(detection: RepetitionDetection, output_ids: np.ndarray) -> int:
    """Count the tokens of `output_ids [num_generated] int64` before the repetitions of its final loop.

    The pattern is the loop's shortest, even one shorter than those searched for.
    """
    sizes = range(detection.smallest_pattern, detection.max_pattern_size + 1)
    loops = (size for size in sizes if _num_alike(output_ids, size) >= size * (detection.min_count - 1))
    length = detection.min_count * next(loops)
    runs = ((size, _num_alike(output_ids, size)) for size in range(1, length))
    return len(output_ids) - next(run for size, run in runs if run >= length - size)


def _num_alike(token_ids: np.ndarray, size: int) -> int:
    """Count the final tokens that each equal the token `size` positions earlier."""
    differs = token_ids[size:] != token_ids[:-size]
    return int(differs[::-1].argmax()) if differs.any() else len(differs)


def closed(sequence: Sequence, thinking: Thinking | None) -> Sequence | None:
    """Return an ended sequence with its thought closed, so that it continues, or None if it stays ended.

    The marker is not drawn: it replaces the end-of-sequence token or follows the loop. There must be room for the
    marker and one more token.
    """
    output_ids = _with_marker(sequence, thinking)
    if output_ids is None or len(output_ids) >= sequence.sampling.max_tokens:
        return None
    return sequence.with_output(output_ids)


def may_be_extended(sequence: Sequence, thinking: Thinking | None) -> bool:
    """Return whether `max_tokens` alone ended a sequence, perhaps without room to close its thought."""
    if sequence.sampling.echo == ALONE:
        return False
    if sequence.finish_reason == LENGTH:
        return True
    output_ids = _with_marker(sequence, thinking)
    return output_ids is not None and len(output_ids) >= sequence.sampling.max_tokens


def _with_marker(sequence: Sequence, thinking: Thinking | None) -> list[int] | None:
    """Return the output with its thought closed, or None if there is nothing to close."""
    if thinking is None or not _is_to_close(sequence):
        return None
    output_ids = sequence.output_ids[:-1] if sequence.finish_reason == STOP else sequence.output_ids
    thought = thinking.in_output(output_ids.tolist())
    marker = thinking.markers.end[thought.num_matched :] if thought.is_open else ()
    return [*output_ids.tolist(), *marker] if marker else None


def _is_to_close(sequence: Sequence) -> bool:
    """Return whether the job asks to close a thought at this finish reason."""
    params = sequence.sampling
    if sequence.finish_reason == STOP:
        is_end = int(sequence.output_ids[-1]) in sequence.eos_token_ids and not params.ignore_eos
        return params.thinking_end == "close" and is_end
    detection = params.repetition_detection
    return sequence.finish_reason == REPETITION and detection is not None and detection.action == "close"
