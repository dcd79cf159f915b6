"""docs/engines.md lists each option of each engine with its defaults."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from swiftbatch.worker.drafters.catalogue import ENGINES, PAPER_ENGINES, EngineEntry
from swiftbatch.worker.drafters.engine_options import AS_PROMPT
from tests.readme.command_lines import page, table


def shown(name: str, value: Any) -> str:
    if name == "budget" and value == AS_PROMPT:
        return "prompt"
    if value is None:
        return "3 each"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def defaults(entries: dict[str, EngineEntry]) -> dict[tuple[str, str], str]:
    return {
        (engine.removesuffix("-paper"), name): shown(name, value)
        for engine, entry in entries.items()
        if entry.options is not None
        for name, value in entry.options
    }


def test_the_page_has_the_defaults_of_all_options() -> None:
    found: list[dict[tuple[str, str], set[str]]] = [defaultdict(set), defaultdict(set)]
    for name, engines, *columns, _ in table(page("docs/engines.md"), "option"):
        for engine in engines.split(", "):
            for place, column in zip(found, columns, strict=True):
                of = engine.strip("`").removesuffix("-paper"), name.strip("`")
                place[of] |= {value.strip("`") for value in column.split(", ") if value}
    for entries, place in zip((ENGINES, PAPER_ENGINES), found, strict=True):
        expected = defaults(entries)
        assert expected.keys() == {of for of, values in place.items() if values}
        assert [of for of, value in expected.items() if value not in place[of]] == []
