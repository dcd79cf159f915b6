"""Parts for the tests of benches: what a table says."""

from __future__ import annotations

import io

from rich.console import Console, Group


def words(table: Group) -> list[list[str]]:
    """Return the words of every line, as on a terminal of 80 columns. None are cut."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "…" not in text
    return [line.split() for line in text.splitlines()]
