"""Operators of tensors in the interpreter, straight to numpy where both operands are of one type: the same numbers.

A type that converts, two shapes that broadcast against each other, and numbers beyond a type go the interpreter's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Operator = Callable[..., Any]
NUMBERS: dict[str, tuple[type, ...]] = {"fp32": (int, float), "int32": (int,), "int64": (int,)}  # that need no cast
DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
LARGEST = 2**30
NOTHING = np.zeros(1)  # where a mask lets nothing come, and nobody says what is there then
_constants: dict[tuple[type, float, str], Any] = {}
_types: dict[tuple[str, str], Any] = {}


def constant(number: float, dtype: str) -> Any:
    """Return a number in an array; nothing writes into arrays that kernels compute with."""
    key = type(number), number, dtype
    if key not in _constants:
        _constants[key] = np.array([number], DTYPES[dtype])
    return _constants[key]


def with_element(type_: Any, element: Any) -> Any:
    """Return a tensor's type with another element, made once."""
    key = type_.name, element.name
    if key not in _types:
        _types[key] = type_.with_element_ty(element)
    return _types[key]


def joint_type(left: Any, right: Any) -> Any:
    """Return the type of what two make, of the left one's element, or None where their shapes do not fit."""
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


def quick(slow: Operator, compute: Operator, dtypes: frozenset[str], is_comparison: bool) -> Operator:
    """Return the operator that takes its short way wherever it can."""

    def run(left: Any, right: Any) -> Any:
        name = left.dtype.name
        if name in dtypes:
            other = right.value if type(right) is tl.constexpr else right
            type_, data = None, None
            if type(other) is tl.tensor:
                if other.dtype.name == name and (type_ := joint_type(left.type, other.type)) is not None:
                    data = compute(left.handle.data, other.handle.data)
            elif type(other) in NUMBERS.get(name, ()) and -LARGEST <= other <= LARGEST:
                type_, data = left.type, compute(left.handle.data, constant(other, name))
            if type_ is not None:
                if is_comparison:
                    type_ = with_element(type_, tl.int1)
                return tl.tensor(TensorHandle(data, left.dtype), type_)
        return slow(left, right)

    return run


def moved(slow: Operator) -> Operator:
    """Return addition that takes the short way to a pointer's neighbours."""

    def run(left: Any, right: Any) -> Any:
        if type(left.dtype) is tl.pointer_type:
            type_, other = None, right.value if type(right) is tl.constexpr else right
            if type(other) is tl.tensor and other.dtype.name in ("int32", "int64"):
                type_, offsets = joint_type(left.type, other.type), other.handle.data
            elif type(other) is int and -LARGEST <= other <= LARGEST:
                type_, offsets = left.type, constant(other, "int32")
            if type_ is not None:
                num_bytes = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
                places = left.handle.data + num_bytes * offsets.astype(np.uint64)
                return tl.tensor(TensorHandle(places, left.dtype), type_)
        return slow(left, right)

    return run


@functools.cache
def filled(shape: tuple[int, ...], dtype: np.dtype[Any], number: float) -> Any:
    """Return an array of one number, made once: loads read it."""
    return np.full(shape, number, dtype)


def loaded(slow: Operator) -> Operator:
    """Return the load of whole blocks and of scalars that takes the short way."""

    def load(self: Any, pointers: Any, mask: Any, other: Any, boundary: Any, padding: str, *hints: Any) -> Any:
        type_, element = pointers.type, getattr(pointers.dtype, "element_ty", tl.int1)
        fits = mask is None or (type_.is_block() and mask.type.is_block() and mask.type.constants is type_.constants)
        if not fits or padding or boundary or element is tl.int1 or element.is_block():
            return slow(self, pointers, mask, other, boundary, padding, *hints)
        shape, dtype = pointers.handle.data.shape, interpreter._get_np_dtype(element)
        seen = filled(shape, np.dtype(bool), True) if mask is None else mask.handle.data
        number = NOTHING if other is None else self.cast(other, element).handle.data
        rest = filled(shape, dtype, number.item()) if number.size == 1 else np.full(shape, number, dtype)
        data = interpreter._interpreter.load(pointers.handle.data, seen, rest, dtype)
        return tl.tensor(TensorHandle(data, element), with_element(type_, element) if type_.is_block() else element)

    return load


def with_axes(slow: Operator) -> Operator:
    """Return the operator `[:, None]`, and others with one new axis, with types made once."""

    def take(block: Any, slices: Any) -> Any:
        parts = getattr(slices, "values", slices)
        if block.type.is_block() and type(parts) in (list, tuple) and parts.count(None) == 1:
            axis, key = parts.index(None), (block.type.name, f"[{parts.index(None)}]")
            if all(part in (None, slice(None)) for part in parts) and len(parts) == len(block.shape.values) + 1:
                if key not in _types:
                    sizes = [*block.type.shape.values]
                    _types[key] = tl.block_type(block.dtype, [*sizes[:axis], 1, *sizes[axis:]])
                return tl.tensor(TensorHandle(np.expand_dims(block.handle.data, axis), block.dtype), _types[key])
        return slow(block, slices)

    return take


NUMERIC, LOGICAL = frozenset(NUMBERS), frozenset({"int1", "int32", "int64"})
ARITHMETIC: dict[str, Operator] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda left, right: np.subtract(right, left),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
BITWISE: dict[str, Operator] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
COMPARISONS: dict[str, Operator] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


def with_short_way(name: str, slow: Operator) -> Operator:
    """Return a member of tensors as it is, or with a short way where it is one of these operators."""
    if name in ARITHMETIC:
        run = quick(slow, ARITHMETIC[name], NUMERIC, is_comparison=False)
        return moved(run) if name == "__add__" else run
    if name == "__getitem__":
        return with_axes(slow)
    if name in BITWISE:
        return quick(slow, BITWISE[name], LOGICAL, is_comparison=False)
    return quick(slow, COMPARISONS[name], NUMERIC, is_comparison=True) if name in COMPARISONS else slow
