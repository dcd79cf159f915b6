"""A few instructions of PTX on a CPU, since no interpreter runs inline assembly."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run_assembly(text: str, num_outputs: int, inputs: Sequence[Words]) -> list[Words]:
    """Return the outputs `$0`, `$1`, ... of an inline assembly over words of 32 bits. Raises KeyError."""
    words = {f"${num_outputs + number}": word for number, word in enumerate(inputs)}
    for line in text.splitlines():
        if found := re.fullmatch(r"(?!\.reg)([a-z]\S+) ([^;]+);", line.strip()):
            out, *names = (each.strip() for each in found[2].split(","))
            given = [words[name] if name in words else np.uint32(int(name, 0)) for name in names]
            words[out] = OPERATIONS[found[1]](*given)
    return [words[f"${number}"] for number in range(num_outputs)]


def permuted(low: Words, high: Words, selector: Words) -> Words:
    number = low.astype(np.uint64) | (np.uint64(high) << np.uint64(32))
    chosen = [(int(selector) >> (4 * place)) & 7 for place in range(4)]
    parts = [((number >> np.uint64(8 * byte)) & np.uint64(255)) << np.uint64(8 * at) for at, byte in enumerate(chosen)]
    return np.bitwise_or.reduce(parts).astype(np.uint32)


def looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert int(table) == 0xEA, "a and b, or c"
    return (a & b) | c


def added_pairs(a: Words, b: Words, c: Words) -> Words:
    """Multiply and add pairs of bfloat16; no product here needs a second rounding."""
    shape = np.broadcast_shapes(*(np.shape(each) for each in (a, b, c)))
    x, y, z = (
        torch.from_numpy(np.broadcast_to(each, shape).copy().view(np.int16)).view(torch.bfloat16).double()
        for each in (a, b, c)
    )
    return (x * y + z).bfloat16().view(torch.int16).numpy().view(np.uint32)


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda word: word,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "fma.rn.bf16x2": added_pairs,
}
