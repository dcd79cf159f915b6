"""Triton's interpreter, without the work that it does again for every call of one kernel function by another."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang


def patch_for_a_launch(_: Any) -> Any:
    """Put the interpreter in the place of all that any kernel function can see of the language."""
    return _patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def call_within_a_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the launch has put there is still there."""
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang = patch_for_a_launch
interpreter.InterpretedFunction.__call__ = call_within_a_launch
