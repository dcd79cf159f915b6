"""Writes docs/options.md with every default: `python -m tests.readme.options_page`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import click

from swiftbatch.scheduler.cli import main
from tests import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options and their defaults

`python -m tests.readme.options_page` makes this page from the commands. An option that is missing here is off,
or its value is found out when the run starts. A default stands in the module that applies it ([map](structure.md)).

| option | default | of `swiftbatch` |
|---|---|---|
"""


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{path}{name}", command


def shown_default(option: click.Option) -> str:
    default = option.to_info_dict()["default"]
    is_off = default is None or default is False or default == () or option.multiple or "Sentinel" in repr(default)
    return "" if is_off else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def page() -> str:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, command in commands(main):
        for each in command.params:
            if isinstance(each, click.Option) and not each.hidden and (default := shown_default(each)):
                found[each.opts[0], default].append(name)
    rows = (f"| `{option}` | {default} | {', '.join(names)} |\n" for (option, default), names in sorted(found.items()))
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
