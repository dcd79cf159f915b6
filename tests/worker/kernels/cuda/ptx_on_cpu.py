"""Runs the PTX of decoders on a CPU: moves of bits, and fused multiplications of pairs of bfloat16 numbers."""

from __future__ import annotations

import re

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def bf16_of(bits: Tensor) -> Tensor:
    """Return the low and the high half of words `[n] int64` as bfloat16 numbers `[n, 2] float64`."""
    halves = torch.stack((bits & 0xFFFF, bits >> 16), dim=-1)
    return (halves << 16).to(torch.uint32).view(torch.float32).double()


def bits_of(numbers: Tensor) -> Tensor:
    """Return words of pairs `[n, 2]`. Raises AssertionError for a number that bfloat16 rounds."""
    narrow = numbers.bfloat16()
    assert torch.equal(narrow.double(), numbers)
    halves = narrow.view(torch.int16).long() & 0xFFFF
    return halves[:, 0] | halves[:, 1] << 16


def lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    found = torch.zeros_like(a + b + c)
    for number in range(8):
        if int(table) >> number & 1:
            signs = ((a, number & 4), (b, number & 2), (c, number & 1))
            one, two, three = (word if is_set else ~word & MASK for word, is_set in signs)
            found |= one & two & three
    return found


def prmt(low: Tensor, high: Tensor, chosen: Tensor) -> Tensor:
    whole = torch.stack([word >> 8 * place & 0xFF for word in (low, high) for place in range(4)])
    places = [chosen >> 4 * place & 15 for place in range(4)]
    assert all(int(place.max()) < 8 for place in places)  # beyond, a sign is repeated
    return sum((whole.expand(8, len(place)).gather(0, place[None])[0] << 8 * number
                for number, place in enumerate(places)), torch.zeros_like(chosen))  # fmt: skip


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, by: a << by & MASK,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": lambda a, b, c: bits_of(bf16_of(a) * bf16_of(b) + bf16_of(c)),
}


def run(ptx: str, words: Tensor, num_outputs: int) -> list[Tensor]:
    """Return outputs `$0` onwards, as bfloat16 pairs `[n, 2]`, for words `[n] int64` of 32 bits."""
    known: dict[str, Tensor] = {f"${num_outputs}": words}
    for line in filter(None, (each.strip() for each in ptx.strip().strip("{}").split(";"))):
        name, rest = line.split(None, 1)
        if name == ".reg":
            continue
        target, *given = re.split(r",\s*", rest)
        of = [known[each] if each in known else torch.tensor([int(each, 0)]) for each in given]
        known[target] = OPERATIONS[name](*(each.expand(len(words)) if name != "lop3.b32" else each for each in of))
    return [bf16_of(known[f"${number}"]) for number in range(num_outputs)]
