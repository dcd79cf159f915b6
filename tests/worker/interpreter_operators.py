"""Tensor operators in numpy if both operands have one type.

Conversions, broadcasts and out-of-range numbers use the interpreter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Operator = Callable[..., Any]
NUMBERS: dict[str, tuple[type, ...]] = {"fp32": (int, float), "int32": (int,), "int64": (int,)}  # that need no cast
DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
LARGEST = {"fp32": 2**31 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}  # these and infinity convert exactly
SMALLEST = 2.0**-126  # smaller ones are float64
NEW_AXES = ("[0]", "[1]", "[2]", "[3]")
_constants: dict[tuple[type, float, str], Any] = {}
_types: dict[tuple[str, str], Any] = {}

_new, _tensor, _block_type, _constexpr = object.__new__, tl.tensor, tl.block_type, tl.constexpr
_pointer_type, _whole = tl.pointer_type, slice(None)


def made(data: Any, dtype: Any, type_: Any) -> Any:
    """Skip constructor calls."""
    handle, made = _new(TensorHandle), _new(_tensor)
    handle.data, handle.dtype = data, dtype
    made.handle, made.type = handle, type_
    made.dtype = type_.element_ty if type(type_) is _block_type else type_
    return made


def takes(number: Any, dtype: str) -> bool:
    """Return whether a number fits this type without a cast."""
    if type(number) not in NUMBERS.get(dtype, ()) or (number == 0 and math.copysign(1, number) < 0):
        return False
    size = abs(number)
    return size == 0 or SMALLEST <= size <= LARGEST[dtype] or size == math.inf


def constant(number: float, dtype: str) -> Any:
    """Return None if this dtype would change the number; kernels never write into its array."""
    kind = type(number)
    if kind is not int and (kind is not float or number == 0):  # there is a negative zero
        return np.array([number], DTYPES[dtype]) if takes(number, dtype) else None
    key = kind, number, dtype
    if key not in _constants:
        _constants[key] = np.array([number], DTYPES[dtype]) if takes(number, dtype) else None
    return _constants[key]


def with_element(type_: Any, element: Any) -> Any:
    key = type_.name, element.name
    if key not in _types:
        _types[key] = type_.with_element_ty(element)
    return _types[key]


def joint_type(left: Any, right: Any) -> Any:
    """Return None for unfit shapes."""
    if not right.is_block():
        return left
    if not left.is_block():
        return with_element(right, left)
    if left.constants is right.constants:
        return left
    key = left.name, right.name
    if key not in _types:
        _types[key] = broadcast_type(left, right)
    return _types[key]


def broadcast_type(left: Any, right: Any) -> Any:
    sizes = [tuple(each.shape.values) for each in (left, right)]
    if len(sizes[0]) != len(sizes[1]) or any(a != b and 1 not in (a, b) for a, b in zip(*sizes, strict=True)):
        return None
    return tl.block_type(left.scalar, list(np.broadcast_shapes(*sizes)))


def wider(left: Any, right: Any) -> Any:
    """Return the type in which numpy computes two, None if unsure."""
    if left.name == right.name:
        return left
    names = left.name, right.name
    return left if names == ("int64", "int32") else right if names == ("int32", "int64") else None


def quick(slow: Operator, compute: Operator, dtypes: frozenset[str], is_comparison: bool) -> Operator:
    kinds: dict[tuple[str, str], Any] = {}  # by the names of two types

    def kind_of(left: Any, right: Any) -> Any:
        """Return the computing and the result type of two, or None."""
        dtype = wider(left.scalar, right.scalar) if left.scalar.name in dtypes else None
        type_ = None if dtype is None else joint_type(left, right)
        if type_ is None:
            return None
        return dtype, with_element(type_, tl.int1 if is_comparison else dtype)

    def run(left: Any, right: Any, *more: Any) -> Any:
        other = right.value if type(right) is _constexpr else right
        is_tensor = type(other) is _tensor
        type_ = left.type
        key = type_.name, other.type.name if is_tensor else ""
        if key not in kinds:
            kinds[key] = kind_of(type_, other.type if is_tensor else type_)
        if (kind := kinds[key]) is not None and not more:
            data = other.handle.data if is_tensor else constant(other, left.dtype.name)
            if data is not None:
                return made(compute(left.handle.data, data), *kind)
        return slow(left, right, *more)

    return run


def moved(slow: Operator) -> Operator:
    """Return addition with a shortcut for pointers."""
    steps: dict[tuple[str, str], Any] = {}  # by the names of two types: the result type, and the bytes of an element
    distances: dict[tuple[str, int], Any] = {}  # in bytes, by a pointer's name

    def num_bytes(pointer: Any) -> int:
        return max(1, pointer.element_ty.primitive_bitwidth // 8)

    def step_of(left: Any, right: Any) -> Any:
        type_ = joint_type(left, right) if right.scalar.name in ("int32", "int64") else None
        return None if type_ is None else (type_, np.array([num_bytes(left.scalar)], np.int64))

    def run(left: Any, right: Any) -> Any:
        pointer = left.dtype
        if type(pointer) is _pointer_type:
            other = right.value if type(right) is _constexpr else right
            if type(other) is _tensor:
                key = left.type.name, other.type.name
                if key not in steps:
                    steps[key] = step_of(left.type, other.type)
                if (step := steps[key]) is not None:
                    type_, size = step
                    return made(left.handle.data + (other.handle.data * size).view(np.uint64), pointer, type_)
            elif takes(other, "int32"):
                place = pointer.name, other
                if place not in distances:
                    distances[place] = np.array([other * num_bytes(pointer)], np.int64).view(np.uint64)
                return made(left.handle.data + distances[place], pointer, left.type)
        return slow(left, right)

    return run


def negative(slow: Operator) -> Operator:
    """Zero stays positive."""
    short = quick(lambda *_: None, lambda left, right: np.subtract(right, left), NUMERIC, is_comparison=False)

    def run(value: Any) -> Any:
        found = short(value, 0)
        return slow(value) if found is None else found

    return run


def with_axes(slow: Operator) -> Operator:
    """Take a shortcut for `[:, None]` and other single new axes."""

    def take(block: Any, slices: Any) -> Any:
        parts = getattr(slices, "values", slices)
        if block.type.is_block() and type(parts) in (list, tuple) and parts.count(None) == 1:
            axis = parts.index(None)
            if len(parts) == block.handle.data.ndim + 1 and parts.count(_whole) == len(parts) - 1:
                key = block.type.name, NEW_AXES[axis]
                if key not in _types:
                    sizes = [*block.type.shape.values]
                    _types[key] = tl.block_type(block.dtype, [*sizes[:axis], 1, *sizes[axis:]])
                return made(block.handle.data[tuple(parts)], block.dtype, _types[key])
        return slow(block, slices)

    return take


UNSIGNED = frozenset({"uint32"})  # with others of this type
NUMERIC, LOGICAL = frozenset(NUMBERS) | UNSIGNED, frozenset({"int1", "int32", "int64"}) | UNSIGNED
FLOATS, WHOLE = frozenset({"fp32"}), frozenset({"int32", "int64"})
ARITHMETIC: dict[str, Operator] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda left, right: np.subtract(right, left),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
DIVISIONS: dict[str, Operator] = {  # of integers, rounding toward zero
    "__floordiv__": lambda left, right: (left - np.fmod(left, right)) // right,
    "__mod__": np.fmod,
    "__rshift__": np.right_shift,
}
BITWISE: dict[str, Operator] = {
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
}
COMPARISONS: dict[str, Operator] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


SHORT_WAYS: dict[str, Callable[[Operator], Operator]] = {
    "__getitem__": with_axes,
    "__truediv__": lambda slow: quick(slow, np.divide, FLOATS, is_comparison=False),
    "__rtruediv__": lambda slow: quick(slow, lambda left, right: np.divide(right, left), FLOATS, is_comparison=False),
    "__neg__": negative,
}
for _operators, _dtypes, _is_comparison in (
    (ARITHMETIC, NUMERIC, False),
    (DIVISIONS, WHOLE, False),
    (BITWISE, LOGICAL, False),
    (COMPARISONS, NUMERIC, True),
):
    for _name, _compute in _operators.items():
        SHORT_WAYS[_name] = functools.partial(quick, compute=_compute, dtypes=_dtypes, is_comparison=_is_comparison)
SHORT_WAYS["__add__"] = lambda slow: moved(quick(slow, np.add, NUMERIC, is_comparison=False))
