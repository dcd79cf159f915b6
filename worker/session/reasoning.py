"""The thought of a finished output, taken out of its text."""

from __future__ import annotations

from swiftbatch.jobs.run.results import Reasoning
from swiftbatch.worker.constraints.thought import Thinking
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.texts.output_text import OutputText


def reasoning_of(sequence: Sequence, text: str, thinking: Thinking | None, output_text: OutputText) -> Reasoning | None:
    """Return what a sequence thought, and what else its text says; markers are in neither. None where nobody thinks.

    `text` is the output's text without what ended it (see `stopping.text_of`), which its last part lacks, too. The
    parts are cut from `text`, each at the first character of its first token.
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
    places = output_text.offsets(output_ids)
    before, behind = text[: places[thought.opened_at - num_start]], text[places[closed] :]
    return Reasoning(text[places[thought.opened_at] : places[end]], before + behind, num_tokens)
