"""The shortcuts of Triton's interpreter give its bits."""

from __future__ import annotations

import importlib.util
import math
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import tests.worker.interpreter  # noqa: F401

pytestmark = pytest.mark.long

SIZE = 16
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.uint32]
FEW = [torch.float16, torch.float64, torch.int8, torch.int16, torch.uint16, torch.uint64]  # no shortcut computes them
NUMBERS = (0, -0.0, 1, -1, 3, 0.5, -2.5, True, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, math.inf, 1e-40)
SYMBOLS: list[Callable[..., Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.and_, operator.or_, operator.xor, operator.rshift, operator.lshift),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]
Step = Callable[..., Any]  # of the language, on two blocks and a mask
OF_TYPES = ("float32", "bfloat16", "float16", "float64", "int1", "int8", "int16", "int32", "int64", "uint8", "uint32")


def steps() -> dict[str, Step]:
    found = {
        **{f"{each} of two": lambda tl, a, b, m, f=each: getattr(tl, f)(a, b) for each in ("maximum", "minimum")},
        "where": lambda tl, a, b, m: tl.where(m, a, b),
        "where of a column": lambda tl, a, b, m: tl.where(m[:, None], a[None, :], b[:, None]),
        "negative": lambda tl, a, b, m: -a,
        "inverted": lambda tl, a, b, m: ~a,
        "program": lambda tl, a, b, m: tl.program_id(0) + a,
    }
    for symbol in SYMBOLS:
        found |= of_symbol(symbol)
    for name in OF_TYPES:
        found |= of_type(name)
    for number in NUMBERS:
        found |= of_number(number)
    return found


def of_symbol(symbol: Step) -> dict[str, Step]:
    name = symbol.__name__
    found: dict[str, Step] = {
        name: lambda tl, a, b, m: symbol(a, b),
        f"{name} of a row and a column": lambda tl, a, b, m: symbol(a[:, None], b[None, :]),
        f"{name} and a sum": lambda tl, a, b, m: symbol(a, tl.max(b, 0)),
    }
    if symbol is not operator.truediv:  # Triton's own interpreter can't divide masks
        found[f"{name} of masks"] = lambda tl, a, b, m: symbol(m, a == b)
    for number in NUMBERS:
        found[f"{name} {number}"] = lambda tl, a, b, m, number=number: symbol(a, number)
        found[f"{number} {name}"] = lambda tl, a, b, m, number=number: symbol(number, a)
    return found


def of_type(name: str) -> dict[str, Step]:
    found: dict[str, Step] = {
        f"to {name}": lambda tl, a, b, m: a.to(getattr(tl, name)),
        f"bits to {name}": lambda tl, a, b, m: a.to(getattr(tl, name), bitcast=True),
    }
    for symbol in (operator.add, operator.mul, operator.mod, operator.lt):
        if name != "bfloat16":  # integers become denormal numbers
            found[f"{symbol.__name__} {name}"] = lambda tl, a, b, m, symbol=symbol: symbol(a, b.to(getattr(tl, name)))
    return found


def of_number(number: float) -> dict[str, Step]:
    return {
        f"where {number}": lambda tl, a, b, m: tl.where(m, a, number),
        f"where not {number}": lambda tl, a, b, m: tl.where(m, number, a),
        f"maximum {number}": lambda tl, a, b, m: tl.maximum(a, number),
        f"minimum {number}": lambda tl, a, b, m: tl.minimum(a, number),
        f"full {number}": lambda tl, a, b, m: tl.full([4], number, a.dtype),
    }


STEPS = steps()


@pytest.fixture(scope="module")
def kernels() -> tuple[ModuleType, ModuleType]:
    """The same kernels with shortcuts, and in a separately imported, unchanged Triton."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "triton"}
    path = Path(__file__).with_name("interpreted_kernels.py")

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    short = loaded("kernels_with_short_ways")
    for name in ours:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    own = loaded("kernels_of_triton")
    others = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    for name in others:
        del sys.modules[name]
    sys.modules.update(ours)
    return short, own


def random_numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Omit denormal bfloat16, where Triton's interpreter differs."""
    random = np.random.default_rng(seed)
    bits = torch.from_numpy(random.integers(0, 256, SIZE * dtype.itemsize, dtype=np.uint8))
    numbers = bits.view(dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        lost = [0.0, -0.0, math.nan, math.inf, -math.inf, limits.max, limits.tiny]
        numbers[numbers.abs() < limits.tiny] = 1.0
    else:
        lost = [0, 1, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    bits.view(SIZE, -1)[random.permutation(SIZE)[: len(lost)]] = (
        torch.tensor(lost, dtype=dtype).view(torch.uint8).view(len(lost), -1)
    )
    return numbers


def found(kernels: ModuleType, dtype: torch.dtype) -> dict[str, Any]:
    """Return each step's type and bits, or its refusal."""
    results: dict[str, Any] = {}

    def keep(step: tuple[str, Step], *given: Any) -> None:
        name, compute = step
        try:
            made = compute(*given)
        except Exception as error:
            results[name] = type(error).__name__
        else:
            data = np.asarray(made.handle.data)
            results[name] = str(made.type), str(made.dtype), str(data.dtype), data.shape, data.tobytes()

    mask = torch.tensor([1, 0, 0, 1] * (SIZE // 4), dtype=torch.int8)
    first, second = random_numbers(dtype, 1), random_numbers(dtype, 2)
    with np.errstate(all="ignore"):
        kernels.compute[(1,)](first, second, mask, SIZE, list(STEPS.items()), keep)
    return results


@pytest.mark.parametrize("dtype", [*DTYPES, *(pytest.param(each, marks=pytest.mark.slow) for each in FEW)], ids=str)
def test_short_ways_give_the_bits_of_triton_s_own(kernels: tuple[ModuleType, ModuleType], dtype: torch.dtype) -> None:
    short, own = (found(each, dtype) for each in kernels)
    assert {name: (short[name], own[name]) for name in own if short[name] != own[name]} == {}


@pytest.mark.parametrize("dtype", DTYPES + FEW, ids=str)
def test_loads_and_stores_by_masks_do(kernels: tuple[ModuleType, ModuleType], dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 0, 1] * (SIZE // 4), dtype=torch.int8)
    source = random_numbers(dtype, 3)
    of_floats = (-2.5, math.nan, math.inf, 2**31) if dtype.is_floating_point else ()  # integers have none of these
    for other in (0.0, -0.0, 1, 77, *of_floats):
        targets = []
        for each in kernels:
            target = torch.zeros(SIZE + 1, dtype=dtype)
            with np.errstate(all="ignore"):
                each.copy[(1,)](source, target, mask, other, SIZE)
            targets.append(target.view(torch.uint8).numpy().tobytes())
        assert targets[0] == targets[1], other
