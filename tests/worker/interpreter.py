"""Triton's interpreter without work repeated per call and operation.

Products are summed in one order on every machine: libraries' kernels let a row's place decide its bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import tests.worker.interpreter_fast_paths  # noqa: F401
from tests.worker.interpreter_functions import bits_down, bits_up, dtype_of

_patch, _cast = interpreter._patch_lang, interpreter.InterpreterBuilder.cast_impl
_new_block_type = tl.block_type.__init__
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


@functools.cache
def patched() -> None:
    _patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def call_within_a_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A launch's changes of the language still apply."""
    run = vars(self).get("rewritten") or vars(self).setdefault("rewritten", self.rewrite())
    return run(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = call_within_a_launch


signature_of = functools.cache(inspect.signature)


def launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """Tensors stay on the CPU."""
    patched()
    signature, builder = signature_of(self.fn), interpreter.interpreter_builder
    bound = signature.bind(*args, **{name: each for name, each in kwargs.items() if name in signature.parameters})
    bound.apply_defaults()
    given = {
        name: each if name in self.constexprs else interpreter._implicit_cvt(each)
        for name, each in bound.arguments.items()
    }
    grid = self.grid(given) if callable(self.grid) else self.grid
    sizes = (*grid, 1, 1)[:3]
    builder.set_grid_dim(*sizes)
    for place in itertools.product(*map(range, sizes)):
        builder.set_grid_idx(*place)
        self.fn(**given)


def summed_in_order(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> interpreter.TensorHandle:
    """Sum by numpy's own loops, whose order depends on shapes alone."""
    product = np.einsum("ij,jk->ik", a.data, b.data, dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = summed_in_order


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Make each type once."""
    key = (element_ty.name, *(each if type(each) is int else each.value for each in shape))
    if key not in _block_types:
        _new_block_type(self, element_ty, shape)
        self.constants = shape_of(*self.shape)
        _block_types[key] = vars(self).copy()
    vars(self).update(_block_types[key])


@functools.cache
def shape_of(*sizes: int) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar


def handle(self: Any, data: Any, dtype: Any) -> None:
    """Comparing sizes is slow."""
    self.data, self.dtype = data, dtype


def cast_by_bits(self: Any, src: Any, dst_type: Any) -> Any:
    """Cast bfloat16 to and from the upper half of float32; `rounded` has rounded before."""
    names = src.dtype.scalar.name, dst_type.scalar.name
    if names == ("bf16", "fp32"):
        return interpreter.TensorHandle(bits_up(src.data), tl.float32)
    if names == ("fp32", "bf16"):
        return interpreter.TensorHandle(bits_down(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


interpreter._get_np_dtype = dtype_of
interpreter.InterpreterBuilder.cast_impl = cast_by_bits
TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # it computes what only debug builds assert
tl.block_type.__init__ = block_type
tl.dtype.constants = shape_of()  # scalars, whose types have no shape
tl.tensor.__init__ = tensor
tl.tensor.numel = property(lambda self: self.type.constants[0])
tl.tensor.shape = property(lambda self: self.type.constants[1])
interpreter.TensorHandle.__init__ = handle
interpreter.TensorHandle.set_attr = lambda *_: None  # hints to a compiler
interpreter.GridExecutor.__call__ = launch
