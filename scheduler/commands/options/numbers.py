"""The numbers that options take: written with the digits 0 to 9, where Python takes those of every script."""

from __future__ import annotations

from typing import Any

import click


class WholeNumber(click.IntRange):
    """A whole number, within bounds where there are some."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_in_our_digits(self, value, param, ctx), param, ctx)


class Number(click.FloatRange):
    """A number, within bounds where there are some."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_in_our_digits(self, value, param, ctx), param, ctx)


def _in_our_digits(
    kind: click.ParamType[Any], value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> Any:
    if isinstance(value, str) and not value.isascii():
        kind.fail(f"found {value!a}, expected a number in the digits 0 to 9", param, ctx)
    return value
