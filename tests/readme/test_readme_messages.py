from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.readme.command_lines import ROOT, page, table

HEAD = "| it says |"
_, *PARTS = page("docs/messages.md").split(HEAD)
MESSAGES = [row[0].strip("`") for part in PARTS for row in table(HEAD + part, "it says")]
GAP = "\0"  # stands for a value in an f-string


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield a syntax tree's texts, with gaps for an f-string's values."""
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = [
        path for room in ("bench", "jobs", "metrics", "scheduler", "worker") for path in (ROOT / room).rglob("*.py")
    ]
    return [text for path in files for text in _texts(ast.parse(path.read_text(encoding="utf-8")))]


def says(message: str, texts: list[str]) -> bool:
    """Return whether a text has the message's words in order; `...` matches anything."""
    pattern = ".*".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_each_message(message: str, texts: list[str]) -> None:
    assert len(message.replace("...", "").split()) >= 3, "too short to be told from others"
    assert says(message, texts)


def test_enough_messages_are_explained_and_a_stale_one_is_found(texts: list[str]) -> None:
    assert len(PARTS) == 5
    assert len(MESSAGES) == len(set(MESSAGES)) >= 70
    assert not says("the run at ... is held by a stranger", texts)
    assert not says("no GPU, and this machine has ... the run was made for cuda", texts)
