"""The user pages and their `swiftbatch` commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import click

from swiftbatch.scheduler.cli import main
from tests import ROOT

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:^|(?<!-n)\s)swiftbatch ([a-z].*)")  # `-n swiftbatch` is kubectl's namespace
PAGES = ("README.md", "k8s/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
SHELL_WORDS = {"|", ">", ">>", "<", "&&", ";", "&"}


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    (found,) = re.findall(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def blocks(text: str) -> list[str]:
    """Return a page's code blocks, with continued lines joined."""
    return [block.replace("\\\n", " ") for block in FENCE.findall(text)]


def spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]


def table(text: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first heading is `first`."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def commands(text: str, command: re.Pattern[str] = COMMAND) -> list[list[str]]:
    """Return a page's distinct commands, without the program."""
    code = [*spans(text), *(line for block in blocks(text) for line in block.splitlines())]
    found = [words_of(match[1]) for line in code if (match := command.search(line))]
    return [list(words) for words in dict.fromkeys(map(tuple, found))]


def all_commands() -> list[list[str]]:
    return [list(words) for words in dict.fromkeys(tuple(words) for path in PAGES for words in commands(page(path)))]


def words_of(command: str) -> list[str]:
    """Return a command's words without shell redirections."""
    words = shlex.split(command, comments=True)
    return words[: next((number for number, word in enumerate(words) if word in SHELL_WORDS), len(words))]


def is_name(words: Sequence[str]) -> bool:
    """Return whether words only name a command or group."""
    command: click.Command | None = main
    for word in words:
        command = command.commands.get(word) if isinstance(command, click.Group) else None
    return command is not None


def options(words: Sequence[str], program: click.Command = main) -> dict[str, Any]:
    """Parse options; none if one such as `--make-key` ends the command.

    Raises click.UsageError.
    """
    command = program
    rest = list(words)
    while isinstance(command, click.Group):
        if command.invoke_without_command and rest[:1] not in [[name] for name in command.commands]:
            break
        name = rest.pop(0)
        if name not in command.commands:
            raise click.UsageError(f"no command {name}")
        command = command.commands[name]
    try:
        with command.make_context(words[0], rest) as context:
            return context.params
    except click.exceptions.Exit:
        return {}
