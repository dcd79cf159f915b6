"""Functions of the language in numpy where shapes and types fit.

Everything else uses the interpreter, as in `interpreter_operators.py`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.worker.interpreter_operators import NUMERIC, Operator, constant, joint_type, made, quick, with_element

Function = Callable[..., Any]
NOTHING = np.zeros(1)  # for masked elements without a default
_tensor, _memory = tl.tensor, interpreter._interpreter
_dtypes: dict[str, np.dtype[Any]] = {}
_elements: dict[str, Any] = {}
_dtype_of = interpreter._get_np_dtype


@functools.cache
def filled(shape: tuple[int, ...], dtype: np.dtype[Any], number: float) -> Any:
    """Make each array once; loads only read it."""
    return np.full(shape, number, dtype)


def dtype_of(type_: Any) -> np.dtype[Any]:
    if type_.name not in _dtypes:
        _dtypes[type_.name] = _dtype_of(type_)
    return _dtypes[type_.name]


def mask_of(pointers: Any, mask: Any) -> Any:
    """Return None for the long way."""
    shape = pointers.handle.data.shape
    if mask is None:
        return filled(shape, np.dtype(bool), True)
    if type(mask) is not _tensor or mask.dtype is not tl.int1:
        return None
    if mask.type.constants is pointers.type.constants:
        return mask.handle.data
    joint = joint_type(pointers.type, mask.type) if pointers.type.is_block() else None
    fits = joint is not None and joint.constants is pointers.type.constants
    return np.broadcast_to(mask.handle.data, shape) if fits else None


def plain_element(pointers: Any) -> Any:
    """Return None if the type is not plain."""
    name = pointers.dtype.name
    if name not in _elements:
        element = getattr(pointers.dtype, "element_ty", None)
        _elements[name] = None if element is None or element is tl.int1 or element.is_block() else element
    return _elements[name]


def number_at(pointer: Any, element: Any) -> Any:
    dtype = dtype_of(element)
    data = np.frombuffer(ctypes.string_at(int(pointer.handle.data[0]), dtype.itemsize), dtype)
    return made(data, element, element)


def load_by(slow: Function) -> Function:
    """Take a shortcut for blocks and scalars."""

    def load(pointers: Any, mask: Any = None, other: Any = None, *more: Any, **hints: Any) -> Any:
        mask = mask.value if type(mask) is tl.constexpr else mask
        other = other.value if type(other) is tl.constexpr else other
        element = plain_element(pointers)
        if mask is None and not more and not hints and element is not None and not pointers.type.is_block():
            return number_at(pointers, element)
        seen = None if more or hints or element is None else mask_of(pointers, mask)
        if seen is None:
            return slow(pointers, mask, other, *more, **hints)
        shape, dtype = pointers.handle.data.shape, dtype_of(element)
        if type(other) is _tensor or other:  # any nonzero number; zero is zero in every type
            semantic = interpreter.interpreter_semantic
            number = semantic.cast(semantic.to_tensor(other), element).handle.data
        else:
            number = NOTHING
        rest = filled(shape, dtype, number.item()) if number.size == 1 else np.full(shape, number, dtype)
        data = _memory.load(pointers.handle.data, seen, rest, dtype)
        return made(data, element, with_element(pointers.type, element))

    return load


def store_by(slow: Function) -> Function:
    def store(pointers: Any, value: Any, mask: Any = None, *more: Any, **hints: Any) -> Any:
        mask = mask.value if type(mask) is tl.constexpr else mask
        element = plain_element(pointers)
        seen = None if more or hints or element is None or type(value) is not _tensor else mask_of(pointers, mask)
        if seen is None or value.type.constants is not pointers.type.constants:
            return slow(pointers, value, mask, *more, **hints)
        value = interpreter.interpreter_semantic.cast(value, element)
        _memory.store(pointers.handle.data, value.handle.data, seen)
        return None

    return store


def where_by(slow: Function) -> Function:
    """Take a shortcut for tensors of one type, or one and a number."""

    def where(condition: Any, first: Any, second: Any, **more: Any) -> Any:
        first, second = (each.value if type(each) is tl.constexpr else each for each in (first, second))
        tensors = [each for each in (first, second) if type(each) is _tensor]
        if not more and tensors and type(condition) is _tensor and condition.dtype is tl.int1:
            like = tensors[0].dtype
            parts = [each if type(each) is _tensor else constant(each, like.name) for each in (first, second)]
            type_ = with_element(condition.type, like)
            for each in parts:
                if type_ is not None and type(each) is _tensor:
                    type_ = joint_type(type_, each.type) if each.dtype.name == like.name else None
            if type_ is not None and parts[0] is not None and parts[1] is not None:
                arrays = (each.handle.data if type(each) is _tensor else each for each in parts)
                return made(np.where(condition.handle.data, *arrays), like, type_)
        return slow(condition, first, second, **more)

    return where


def bits_up(data: Any) -> Any:
    """Return bfloat16 as float32."""
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bits_down(data: Any) -> Any:
    """Return the upper halves of float32, already rounded."""
    return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


CONVERSIONS: dict[tuple[str, str, bool], Function] = {
    ("bf16", "fp32", False): bits_up,
    ("fp32", "bf16", False): bits_down,
    ("int32", "int64", False): lambda data: data.astype(np.int64),
    ("int32", "fp32", False): lambda data: data.astype(np.float32),
    ("int8", "int32", False): lambda data: data.astype(np.int32),
    ("uint8", "int32", False): lambda data: data.astype(np.int32),
    ("int1", "int32", False): lambda data: data.astype(np.int32),
    ("fp32", "int32", True): lambda data: data.view(np.int32),
    ("int32", "fp32", True): lambda data: data.view(np.float32),
}


def converted(value: Any, kind: Any, is_bitcast: bool) -> Any:
    """Return None for the long way."""
    if value.dtype is kind:
        return value
    convert = CONVERSIONS.get((value.dtype.name, kind.name, is_bitcast))
    return convert and made(convert(value.handle.data), kind, with_element(value.type, kind))


def to_by(slow: Function) -> Function:
    """Take a shortcut between common types."""

    def to(value: Any, dtype: Any, *more: Any, bitcast: Any = False, **rest: Any) -> Any:
        kind = dtype.value if type(dtype) is tl.constexpr else dtype
        found = converted(value, kind, bitcast) if type(bitcast) is bool and not more and not rest else None
        return slow(value, dtype, *more, bitcast=bitcast, **rest) if found is None else found

    return to


@functools.cache
def program_number(number: int) -> Any:
    return made(np.array([number], np.int32), tl.int32, tl.int32)


def program_id_by(slow: Function) -> Function:
    def program_id(axis: Any, **_: Any) -> Any:
        axis = axis.value if type(axis) is tl.constexpr else axis
        return program_number(interpreter.interpreter_builder.grid_idx[axis])

    return program_id


def made_once(slow: Function) -> Function:
    """Cache blocks that only depend on numbers; kernels never write into them."""
    kept: dict[Any, Any] = {}

    def make(*args: Any, **kwargs: Any) -> Any:
        key = (*(plain(each) for each in (*args, *kwargs.values())), *kwargs)
        if None in key:
            return slow(*args, **kwargs)
        if key not in kept:
            kept[key] = slow(*args, **kwargs)
        return kept[key]

    return make


def plain(value: Any) -> Any:
    """Return an argument's key, None for tensors."""
    value = value.value if type(value) is tl.constexpr else value
    if type(value) is int:
        return value
    if isinstance(value, tl.dtype):
        return value.name
    if isinstance(value, list | tuple | tl.tuple):
        return tuple(plain(each) for each in value)
    return (type(value), repr(value)) if type(value) in (float, bool) else None  # there is a negative zero


def greatest_by(compute: Operator, slow: Function) -> Function:
    short = quick(lambda *_: None, compute, NUMERIC, is_comparison=False)

    def greatest(first: Any, second: Any, **more: Any) -> Any:
        found = short(first, second) if type(first) is _tensor and not more else None
        return slow(first, second, **more) if found is None else found

    return greatest


def dot_by(slow: Function) -> Function:
    """Return float32 `acc + a @ b` by numpy's own loops, whose order depends on shapes alone."""

    def dot(a: Any, b: Any, acc: Any = None, **more: Any) -> Any:
        tensors = (a, b, acc)
        if all(type(each) is _tensor and each.dtype is tl.float32 for each in tensors) and a.handle.data.ndim == 2:
            product = np.einsum("ij,jk->ik", a.handle.data, b.handle.data, dtype=np.float32)
            if product.shape == acc.handle.data.shape:
                return made(product + acc.handle.data, tl.float32, acc.type)
        return slow(a, b, acc, **more)

    return dot


FUNCTIONS: dict[str, Callable[[Function], Function]] = {
    "load": load_by,
    "store": store_by,
    "where": where_by,
    "program_id": program_id_by,
    "arange": made_once,
    "full": made_once,
    "dot": dot_by,
    "maximum": functools.partial(greatest_by, np.maximum),
    "minimum": functools.partial(greatest_by, np.minimum),
}
