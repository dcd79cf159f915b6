"""Reads lines that differ from an earlier one in fields of their own alone: what both say is not checked again.

The lines of a file mostly say the same but for a name, a text, a limit and a seed. A line whose own fields are not
plainly good is read as a whole, so that every reason for a refusal is the same as without this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from swiftbatch.jobs.chat import Message
from swiftbatch.jobs.input.line_formats import text_id
from swiftbatch.jobs.input.line_parsing import JobLine, line_from_object
from swiftbatch.jobs.job import MAX_CUSTOM_ID, Messages
from swiftbatch.jobs.sampling import MAX_COUNT, MAX_SEED, MIN_SEED, derive_seed

MAX_KINDS = 1000  # a file may have a kind for each line
MAX_LETTERS = 4000  # of what a kind is known by
OWN = ("prompt", "messages", "max_tokens", "seed")
BOUND_TO_OWN = ("max_completion_tokens", "min_tokens")  # are good or not depending on a line's `max_tokens`
MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(Messages, config=ConfigDict(strict=True))


@dataclass(frozen=True)
class LineKinds:
    """The kinds of a file's lines: the first good line of each, by all that it says but its own fields."""

    run_seed: int
    _firsts: dict[str, JobLine] = field(default_factory=dict)

    def line(self, values: dict[str, Any]) -> JobLine:
        """The line that `line_from_object` makes of the same values. Raises `LineError` as that does."""
        body = values.get("body")
        fields = body if isinstance(body, dict) else values
        try:
            kind = _kind(values, fields)
        except RecursionError:
            return line_from_object(values, self.run_seed)
        first = self._firsts.get(kind)
        if first is not None and (own := self._own(text_id(values.get("custom_id")), fields, first)) is not None:
            return own
        line = line_from_object(values, self.run_seed)
        if len(self._firsts) < MAX_KINDS and len(kind) <= MAX_LETTERS and not fields.keys() & set(BOUND_TO_OWN):
            self._firsts.setdefault(kind, line)
        return line

    def _own(self, custom_id: object, fields: dict[str, Any], first: JobLine) -> JobLine | None:
        """A line of the same kind as `first` with its own fields; None where one of them is not plainly good."""
        prompt, messages = fields.get("prompt"), fields.get("messages")
        max_tokens, seed = fields.get("max_tokens", 1), fields.get("seed", 0)
        is_named = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID and custom_id.isascii()
        is_counted = type(max_tokens) is int and 0 < max_tokens <= MAX_COUNT
        if not is_named or not is_counted or type(seed) is not int or not MIN_SEED <= seed <= MAX_SEED:
            return None
        if (prompt is None) == (messages is None) or (messages is None) != (first.messages is None):
            return None
        if messages is None and (not isinstance(prompt, str) or not prompt or not _is_utf8(prompt)):
            return None
        checked = None if messages is None else _messages(messages)
        if messages is not None and checked is None:
            return None
        name = str(custom_id)
        return JobLine(  # `replace` takes twice as long
            custom_id=name,
            prompts=() if checked is not None else (str(prompt),),
            messages=checked,
            template=first.template,
            sampling={**first.sampling, "seed": seed if "seed" in fields else derive_seed(self.run_seed, name)},
            num_choices=first.num_choices,
            max_tokens=max_tokens if "max_tokens" in fields else first.max_tokens,
            priority=first.priority,
            without_effect=first.without_effect,
            format_field=first.format_field,
            checked=first.checked,
        )


def _kind(values: dict[str, Any], fields: dict[str, Any]) -> str:
    """All that a line says beside its own fields, and which of these it has. Unlike ==, repr tells 1, 1.0 and true."""
    around = [] if fields is values else [(name, value) for name, value in values.items() if name not in _AROUND]
    rest = [(name, None) if name in _OWN else (name, value) for name, value in fields.items()]
    return repr((around, rest))


_AROUND, _OWN = frozenset({"custom_id", "body"}), frozenset({"custom_id", *OWN})


def _messages(value: object) -> tuple[Message, ...] | None:
    try:
        return MESSAGES.validate_python(value)
    except ValidationError:
        return None


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
