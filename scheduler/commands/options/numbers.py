"""The numbers that options take: written with the digits 0 to 9, where Python takes those of every script."""

from __future__ import annotations

from typing import Any

import click
from click.types import FloatParamType, IntParamType


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
