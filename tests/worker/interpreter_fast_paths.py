"""Shortcuts in the interpreter's Python: equal numbers in a third of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.worker.interpreter_functions import FUNCTIONS, converted, to_by
from tests.worker.interpreter_operators import NUMBERS, SHORT_WAYS, takes

_check_types, _broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
_cast, _to_tensor = TritonSemantic.cast, TritonSemantic.to_tensor
_unwrap, _constant = core._unwrap_if_constexpr, TritonSemantic.scalar_constant
_WRAPPINGS = (tl.constexpr, tl.tuple, list, tuple)
_is_plain: dict[type, bool] = {}
_constants: dict[tuple[Any, ...], Any] = {}


def unwrapped(value: Any) -> Any:
    """Most values wrap nothing."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    if kind not in _is_plain:
        _is_plain[kind] = not issubclass(kind, _WRAPPINGS)
    return value if _is_plain[kind] else _unwrap(value)


def is_same_type(self: Any, other: Any) -> bool:
    """Most types are compared with themselves."""
    return self is other or (isinstance(kind := unwrapped(other), tl.dtype) and self.name == kind.name)


def constant(self: Any, value: Any, dtype: Any) -> Any:
    """Make an array once; kernels never write into it."""
    key = type(value), value, dtype.name
    if key not in _constants:
        _constants[key] = _constant(self, value, dtype).handle
    return self.tensor(_constants[key], dtype)


def operands(self: Any, lhs: Any, rhs: Any, *rules: Any, **more_rules: Any) -> Any:
    """Return tensors of one type, and fitting numbers, with one shape at most."""
    if type(lhs) is tl.tensor:
        name = lhs.dtype.name
        if type(rhs) is tl.tensor:
            if name == rhs.dtype.name and name in NUMBERS:
                return self.broadcast_impl_value(lhs, rhs)
        elif takes(rhs, name):
            return self.broadcast_impl_value(lhs, constant(self, rhs, lhs.dtype))
    return _check_types(self, lhs, rhs, *rules, **more_rules)


def in_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = lhs.type, rhs.type
    if left.is_block():
        if right.is_block() and left.constants is right.constants:
            return lhs, rhs
        if not right.is_block():
            return lhs, _repeated(rhs, left)
    elif right.is_block():
        return _repeated(lhs, right), rhs
    return (lhs, rhs) if not left.is_block() else _broadcast(self, lhs, rhs)


def _repeated(scalar: Any, like: Any) -> Any:
    data = scalar.handle.data
    handle = interpreter.TensorHandle(np.full(like.shape.values, data, data.dtype), scalar.dtype)
    return tl.tensor(handle, like.with_element_ty(scalar.dtype))


def cast(self: Any, tensor: Any, kind: Any, *rounding: Any, **more: Any) -> Any:
    """Return a tensor of the right dtype unchanged."""
    found = None if rounding or more or kind.is_block() else converted(tensor, kind, is_bitcast=False)
    return _cast(self, tensor, kind, *rounding, **more) if found is None else found


def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
    return value if type(value) is tl.tensor else _to_tensor(self, value, check_type)


def patch_member(obj: Any, name: str, member: Callable[..., Any], _: Any, scope: Any) -> None:
    """Always use the interpreter's semantics."""
    inner = getattr(member, "__wrapped__", member)  # without the check for semantics

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    short_way = (SHORT_WAYS if obj is tl.tensor else FUNCTIONS if obj in (tl, core) else {}).get(name)
    scope.set_attr(obj, name, interpreted if short_way is None else short_way(interpreted))


core._unwrap_if_constexpr = unwrapped
tl.dtype.__eq__ = is_same_type
TritonSemantic.scalar_constant = constant
TritonSemantic.cast = cast
TritonSemantic.to_tensor = to_tensor
TritonSemantic.binary_op_type_checking_impl = operands
TritonSemantic.broadcast_impl_value = in_one_shape
interpreter._patch_attr = patch_member
SHORT_WAYS["to"] = to_by
