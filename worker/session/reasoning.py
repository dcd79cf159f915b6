"""The thought of a finished output, taken out of its text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from jobs.run.results import Reasoning
from worker.constraints.thought import Thinking
from worker.sequence import Sequence


def reasoning_of(
    sequence: Sequence, text: str, thinking: Thinking | None, decode: Callable[[list[int]], str]
) -> Reasoning | None:
    """What a sequence thought, and what else its text says; markers are in neither. None where nobody thinks.

    `text` is the output's without what ended it (see `stopping.text_of`): that is gone from the last of its parts.
    """
    if thinking is None:
        return None
    output_ids = sequence.output_ids.tolist()
    thought = thinking.in_output(output_ids)
    if thought.opened_at is None:
        return Reasoning("", text, 0)
    num_start = len(thinking.markers.start) if thought.opened_at else 0
    num_tokens = thought.num_tokens - (thought.num_matched if thought.is_open else 0)  # a marker may be cut off, too
    end = thought.opened_at + num_tokens
    closed = len(output_ids) if thought.closed_at is None else thought.closed_at
    cuts = (0, thought.opened_at - num_start, thought.opened_at, end, closed, len(output_ids))
    parts = [decode(output_ids[first:last]) for first, last in pairwise(cuts)]
    num_gone = len(decode(output_ids)) - len(text)
    for number in reversed(range(len(parts))):
        part = parts[number]
        parts[number] = part[: max(0, len(part) - num_gone)]
        num_gone = max(0, num_gone - len(part))
    before, _, said, _, behind = parts
    return Reasoning(said, before + behind, num_tokens)
