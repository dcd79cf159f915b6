"""Types of options: under headings of the help, in the same columns; and numbers in the digits 0 to 9."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.types import FloatParamType, IntParamType

COLUMN_WIDTH = 27

Command = TypeVar("Command", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option under a heading. What numbers it takes, its refusals say: the help keeps to one line."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what click tells beside an option's help, without the range."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command whose help has its options under their headings, in the order of the first ones; `--help` is last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            row = option.get_help_record(ctx)
            if row is None or isinstance(option, click.Argument):
                continue
            name, text = row
            heading = option.group if isinstance(option, GroupedOption) else [*groups][-1]
            groups.setdefault(heading, []).append((name.ljust(COLUMN_WIDTH), text))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=COLUMN_WIDTH)


def options_of(group: str) -> Callable[..., Callable[[Command], Command]]:
    """`click.option` for options under a heading."""
    return functools.partial(click.option, cls=GroupedOption, group=group)


class InOurDigits(click.ParamType[Any]):
    """Refuses other digits in front of the conversion that stands behind this class."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.isascii():
            self.fail(f"found {value!a}, expected a number in the digits 0 to 9", param, ctx)
        return super().convert(value, param, ctx)


class WholeNumber(InOurDigits, click.IntRange):
    """A whole number within bounds."""


class Number(InOurDigits, click.FloatRange):
    """A number within bounds."""


class _AnyWholeNumber(InOurDigits, IntParamType):
    """A whole number. Without bounds a class of its own: `--help` would show bounds that are none."""


class _AnyNumber(InOurDigits, FloatParamType):
    """A number; see `_AnyWholeNumber`."""


ANY_WHOLE_NUMBER, ANY_NUMBER = _AnyWholeNumber(), _AnyNumber()
