"""Leaves keywords out of a schema that the grammar library cannot hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from swiftbatch.jobs.structured_output import DATA, NAMED

# a reason names the keywords that the library does not know, or one whose value it cannot hold
UNKNOWN = re.compile(r'found ((?:"[^"]+"(?:, )?)+), not supported')
UNHELD = re.compile(r"found (oneOf|minProperties|multipleOf|pattern|\$ref)\b")

IsUnheld = Callable[[dict[str, Any]], bool]
"""Tests that a schema with one keyword, or two, is refused for that keyword."""


def named_keywords(reason: str) -> set[str]:
    """Return the keywords that are the reason of a refusal; none if it is something else."""
    if unknown := UNKNOWN.match(reason):
        return set(re.findall(r'"([^"]+)"', unknown[1]))
    unheld = UNHELD.match(reason)
    return set() if unheld is None else {unheld[1]}


class Leniency:
    """Leaves keywords out, wherever a schema has them; `ignored` has those that were there.

    A pattern, a reference, a `multipleOf` and `minProperties` are left out only where `is_unheld` says so. A `oneOf`
    becomes an `anyOf`.
    """

    def __init__(self, keywords: set[str], is_unheld: IsUnheld) -> None:
        self.ignored = set[str]()
        self.keywords, self._is_unheld = keywords, is_unheld

    def without(self, schema: Any) -> Any:
        """Return a schema without the keywords."""
        if isinstance(schema, list):
            return [self.without(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            if name in self.keywords and self._is_left_out(name, value, schema):
                self.ignored.add(name)
                if name == "oneOf" and "anyOf" not in schema:
                    kept["anyOf"] = self.without(value)
            else:
                kept[name] = self._kept(name, value)
        return kept

    def _is_left_out(self, name: str, value: Any, schema: Mapping[str, Any]) -> bool:
        if name == "minProperties":
            beside = ("properties", "additionalProperties", "patternProperties")
            return self._is_unheld({name: value, **{each: schema[each] for each in beside if each in schema}})
        if name == "$ref":
            return isinstance(value, str) and not value.startswith("#")
        return name not in ("pattern", "multipleOf") or self._is_unheld({name: value})

    def _kept(self, name: str, value: Any) -> Any:
        if name in DATA:
            return value
        if name not in NAMED or not isinstance(value, Mapping):
            return self.without(value)
        kept = {each: self.without(schema) for each, schema in value.items()}
        if name != "patternProperties" or "pattern" not in self.keywords:
            return kept
        held = {pattern: schema for pattern, schema in kept.items() if not self._is_unheld({"pattern": pattern})}
        self.ignored |= {name} if len(held) < len(kept) else set()
        return held
