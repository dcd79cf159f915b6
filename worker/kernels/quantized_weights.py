"""Weight matrices in 8 or 4 bits: codes, and the numbers that the codes of each format stand for.

A packed matrix stands for `table[code] * scale + offset`, computed in float32 and rounded once to its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

Code = Literal["uint4", "e2m1", "iq4_nl", "int8", "uint8", "e4m3"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # llama.cpp's `kvalues_iq4nl`
TABLES: dict[Code, Tensor] = {
    "uint4": torch.arange(16.0),
    "e2m1": torch.tensor([*E2M1, *(-each for each in E2M1)]),
    "iq4_nl": torch.tensor(IQ4_NL, dtype=torch.float32),
    "int8": torch.arange(256, dtype=torch.uint8).view(torch.int8).float(),
    "uint8": torch.arange(256.0),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
}
# Bits of the integer that, times a power of two, is a code's number.
SIGNIFICANT_BITS: dict[Code, int] = {"uint4": 4, "e2m1": 2, "iq4_nl": 7, "int8": 7, "uint8": 8, "e4m3": 4}
INTEGER_PIECE = 32  # numbers of a row that share a scale, where rows are rounded to 8 bits
CODE_BITS: dict[Code, int] = {code: len(table).bit_length() - 1 for code, table in TABLES.items()}


@dataclass(frozen=True)
class PackedMatrix:
    """Matrix `[num_columns, depth]` of `dtype`, as a linear layer stores it.

    `codes [num_columns, depth] uint8`, or `[num_columns, depth / 2]` with 4 bits, low halves first. `scales
    [num_columns, num_groups] float32`, and `offsets` like them; code times scale must be exact in float32, so that
    fused and unfused additions of the offset agree. Raises ValueError.
    """

    code: Code
    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        num_columns, depth = self.shape
        groups = self.scales.shape[1] if self.scales.dim() == 2 else 0
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.float32:
            raise ValueError(f"found codes of {self.codes.dtype}, scales of {self.scales.dtype}")
        if self.scales.shape[0] != num_columns or groups == 0 or depth % groups or (depth // groups) % 2:
            raise ValueError(f"found scales {list(self.scales.shape)} for a matrix {[num_columns, depth]}")
        if not all(bool(each.isfinite().all()) for each in (self.scales, self.offsets) if each is not None):
            raise ValueError("found scales or offsets that are no finite numbers")
        if self.offsets is None:
            return
        if self.offsets.shape != self.scales.shape or self.offsets.dtype != torch.float32:
            raise ValueError(f"found offsets {list(self.offsets.shape)} beside scales {list(self.scales.shape)}")
        if not self._has_exact_products():
            raise ValueError("found scales whose products round in front of their offsets")

    @property
    def shape(self) -> tuple[int, int]:
        """Return columns and depth."""
        num_columns, width = self.codes.shape
        return num_columns, width * 8 // CODE_BITS[self.code]

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_of_integers(self) -> bool:
        """Return whether products with rows of 8 bits know this form: source/integer_products.h."""
        groups = self.group_size == INTEGER_PIECE // 2 or self.group_size % INTEGER_PIECE == 0
        return self.code != "e4m3" and groups and self.shape[1] % INTEGER_PIECE == 0

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offsets

    def rows(self, chosen: Tensor | slice) -> PackedMatrix:
        """Return chosen rows of the stored matrix, in the given order."""
        offsets = None if self.offsets is None else self.offsets[chosen]
        return PackedMatrix(self.code, self.codes[chosen], self.scales[chosen], self.dtype, offsets)

    def between(self, start: int, end: int) -> PackedMatrix:
        """Return a part of the depth. Raises ValueError if it cuts a group, unless a row has one group."""
        bits, group = CODE_BITS[self.code], self.group_size
        chosen = slice(None)
        if self.scales.shape[1] > 1:
            if start % group or end % group:
                raise ValueError(f"found a part {start} to {end} of groups of {group}")
            chosen = slice(start // group, end // group)
        codes = self.codes[:, start * bits // 8 : end * bits // 8].contiguous()
        offsets = None if self.offsets is None else self.offsets[:, chosen].contiguous()
        return PackedMatrix(self.code, codes, self.scales[:, chosen].contiguous(), self.dtype, offsets)

    def split(self, widths: Sequence[int]) -> list[PackedMatrix]:
        """Split the rows into matrices of `widths` rows. Raises ValueError unless `widths` add up to all rows."""
        if sum(widths) != self.shape[0]:
            raise ValueError(f"found {self.shape[0]} rows, expected {sum(widths)}")
        ends = torch.tensor(widths).cumsum(0).tolist()
        return [self.rows(slice(end - width, end)) for width, end in zip(widths, ends, strict=True)]

    @property
    def form(self) -> tuple[Code, int, bool, torch.dtype]:
        """Return the properties that must be equal to stack matrices of the same depth."""
        return self.code, self.group_size, self.offsets is not None, self.dtype

    def to(self, device: torch.device) -> Self:
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets)

    def dequantized(self) -> Tensor:
        """Return the matrix `[num_columns, depth]` as numbers."""
        codes = self.codes
        if CODE_BITS[self.code] == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        values = TABLES[self.code].to(codes.device)[codes.int()].unflatten(1, (-1, self.group_size))
        values = values * self.scales[..., None]
        if self.offsets is not None:
            values = values + self.offsets[..., None]
        whole: Tensor = values.flatten(1).to(self.dtype)
        return whole

    def _has_exact_products(self) -> bool:
        """Return whether scales times codes are exact in float32."""
        widest = int(self.codes.max()).bit_length() if self.code == "uint8" else SIGNIFICANT_BITS[self.code]
        spare = (1 << widest) - 1
        return not bool((self.scales.contiguous().view(torch.int32) & spare).any())


@dataclass(frozen=True)
class PackedExperts(PackedMatrix):
    """Stacked matrices of experts, standing for a tensor with a leading dimension; all may be transposed."""

    num_experts: int = 1
    is_transposed: bool = False

    def experts(self) -> list[PackedMatrix]:
        return self.split([self.shape[0] // self.num_experts] * self.num_experts)

    def dequantized(self) -> Tensor:
        """Return the tensor `[num_experts, rows, columns]`, unpacking one expert at a time."""
        return torch.stack(
            [each.dequantized().T if self.is_transposed else each.dequantized() for each in self.experts()]
        )


def stacked(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Stack matrices of one form."""
    first = matrices[0]
    codes, scales = _below([each.codes for each in matrices]), _below([each.scales for each in matrices])
    offsets = [each.offsets for each in matrices if each.offsets is not None]
    return PackedMatrix(first.code, codes, scales, first.dtype, _below(offsets) if offsets else None)


def _below(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


Weight = Tensor | PackedMatrix


def plain(weight: Weight) -> Tensor:
    return weight.dequantized() if isinstance(weight, PackedMatrix) else weight


@dataclass(frozen=True)
class Linear:
    """`weight [columns, depth]` as in torch, and `bias [columns]`."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class PackedLinear:
    """Linear layer with a weight in 8 or 4 bits."""

    weight: PackedMatrix
    bias: Tensor | None = None


AnyLinear = Linear | PackedLinear


def linear_from(weight: Weight, bias: Tensor | None = None) -> AnyLinear:
    return PackedLinear(weight, bias) if isinstance(weight, PackedMatrix) else Linear(weight, bias)
