"""The columns of a data set that stand for fields of a line, as `--column FIELD=COLUMN` says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.forms import BatchLine, ShortLine
from swiftbatch.jobs.input.lines import LineError
from swiftbatch.jobs.input.reasons import shown

FIELDS = tuple(dict.fromkeys(["custom_id", "prompt", "messages", *ShortLine.model_fields, *BatchLine.model_fields]))
SHORT_TEXTS = {"prompt", "messages"}
BATCH = {"method", "url", "body"}


class ColumnError(UserError):
    """An error in what is said of columns."""


@dataclass(frozen=True)
class Columns:
    """The columns of fields, by field. Without any, a line's names are its fields."""

    by_field: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, said: Iterable[str]) -> Columns:
        """The columns of some `FIELD=COLUMN`. Raises ColumnError."""
        by_field: dict[str, str] = {}
        for text in said:
            name, _, column = text.partition("=")
            if not name or not column:
                raise ColumnError(f"found {shown(text)}, expected FIELD=COLUMN, as in prompt=text")
            if name not in FIELDS:
                raise ColumnError(f"unknown field {shown(name)}, expected one of: {', '.join(FIELDS)}")
            if name in by_field:
                raise ColumnError(f"found two columns for the field {shown(name)}, expected one")
            by_field[name] = column
        return cls(by_field)

    def chosen(self, names: Collection[str]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        """The columns of `names` that are read, each behind its field, and the names that are passed over.

        If some fields have columns, another column is read where its name is a field's. But where a text or a form of
        line has a column, other texts and forms of line are passed over.
        """
        if not self.by_field:
            return [(name, name) for name in names], ()
        pairs = [(name, column) for name, column in self.by_field.items() if column in names]
        pairs += [(name, name) for name in names if name in FIELDS and name not in self._settled()]
        used = {column for _, column in pairs}
        return pairs, tuple(name for name in names if name not in used)

    def applied(self, values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The fields of one line, and the names in it that were passed over. A number as `custom_id` becomes text.

        Raises LineError where the line has no `custom_id`, or no text, under the name that it is said to have.
        """
        if not self.by_field:
            return values, ()
        for needed in ({"custom_id"}, SHORT_TEXTS | BATCH):
            said = [name for name in self.by_field if name in needed]
            if said and not any(self.by_field[name] in values for name in said):
                column = self.by_field[said[0]]
                raise LineError(f"field {shown(column)}: found nothing, expected the {said[0]} as --column says")
        pairs, passed_over = self.chosen(values.keys())
        return with_text_id({name: values[column] for name, column in pairs}), passed_over

    def absent(self, names: Collection[str]) -> list[str]:
        """The `FIELD=COLUMN` whose column is not among `names`."""
        return [f"{name}={column}" for name, column in self.by_field.items() if column not in names]

    def _settled(self) -> set[str]:
        """The fields that no column is read for because of its name alone."""
        settled = set(self.by_field)
        if settled & SHORT_TEXTS:
            return settled | SHORT_TEXTS | BATCH
        return settled | SHORT_TEXTS if settled & BATCH else settled


def with_text_id(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the digits of a `custom_id` that is a whole number: data sets count their rows."""
    custom_id = values.get("custom_id")
    return values | {"custom_id": str(custom_id)} if type(custom_id) is int else values
