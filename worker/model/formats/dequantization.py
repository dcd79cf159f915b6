"""Decodes quantized weights: integers of 2 to 8 bits, 8-bit and 4-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.quantized_weights import (
    CODE_BITS,
    TABLES,
    Code,
    PackedExperts,
    PackedMatrix,
    Weight,
    plain,
)
from swiftbatch.worker.model.formats.compressed_tensors import ByteScheme, PackedScheme
from swiftbatch.worker.model.formats.contract import WHOLE, FormatError, Scheme, group_that_divides
from swiftbatch.worker.model.formats.float_formats import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    ExpertScheme,
    FloatScheme,
    FP4Scheme,
    MXFP4Scheme,
    NVFP4Scheme,
)
from swiftbatch.worker.model.formats.gptq_awq import AWQScheme, GPTQScheme

Parts = Mapping[str, Tensor]
CHUNK = 1 << 24  # numbers that are in float32 at the same time
SPARE_BITS = {4: 0xF, 8: 0xFF}  # by bits of a code: low bits of a scale that must be 0 for exact products


def scaled(code: Code, codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Weight:
    """Return `table[code] * scale` for `scales [num_columns, num_groups]`; the last group may be shorter."""
    depth = codes.shape[1] * 8 // CODE_BITS[code]
    if size := group_that_divides(depth, group):
        return PackedMatrix(code, codes.contiguous(), by_group(scales, depth, group, size), dtype)
    return dense(code, codes, scales[:, torch.arange(depth) // group], dtype)


def by_group(values: Tensor, depth: int, group: int, size: int) -> Tensor:
    return values[:, torch.arange(0, depth, size) // group].contiguous()


def dense(code: Code, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(scales.shape, dtype=dtype)
    step = max(1, CHUNK // scales.shape[1])
    for start in range(0, len(scales), step):
        rows = slice(start, start + step)
        found = codes[rows] if CODE_BITS[code] == 8 else halves(codes[rows])
        whole[rows] = (TABLES[code][found.int()] * scales[rows]).to(dtype)
    return whole


def halves(codes: Tensor) -> Tensor:
    """Unpack two codes of 4 bits from each byte, the low half first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Pack two codes of 4 bits into each byte, the first code into the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def numbers(scales: Tensor) -> Tensor:
    """Return scales in float32. Raises FormatError if a scale is not finite."""
    found = scales.float()
    if not bool(found.isfinite().all()):
        raise FormatError("its scales are not finite: the file is damaged")
    return found


# Decodes integer codes of 2 to 8 bits as `(code - zero) * scale`: compressed-tensors, GPTQ and AWQ.

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # index of each column within a word of AWQ


@dataclass(frozen=True)
class Integers:
    """`codes [num_columns, depth] uint8` of some bits, with `zeros` and `scales [num_columns, num_groups]`.

    `group_of` is the group of each input feature, if groups are not contiguous.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    bits: int
    group: int
    group_of: Tensor | None = None

    def weight(self, dtype: torch.dtype) -> Weight:
        """Return the matrix packed in 4 bits if that is exact, otherwise in 8 bits, otherwise dequantized."""
        if self.group_of is not None:
            return self._dense(self.group_of, dtype)
        if self.bits == 8 and bool((self.zeros == 128).all()):
            return scaled("int8", self.codes ^ 128, self.scales, self.group, dtype)
        depth = self.codes.shape[1]
        code: Code = "uint4" if self.bits <= 4 else "uint8"
        if (size := group_that_divides(depth, self.group)) and self._has_exact_products():
            scales = by_group(self.scales, depth, self.group, size)
            offsets = by_group(self.zeros.float() * -self.scales, depth, self.group, size)
            codes = paired(self.codes) if code == "uint4" else self.codes.contiguous()
            return PackedMatrix(code, codes, scales, dtype, offsets)
        spread = torch.arange(depth) // self.group
        if self.bits <= 4:
            differences = self.codes.to(torch.int8) - self.zeros.to(torch.int8)[:, spread]
            return scaled("int8", differences.view(torch.uint8), self.scales, self.group, dtype)
        return self._dense(spread, dtype)

    def _has_exact_products(self) -> bool:
        spare = SPARE_BITS[4 if self.bits <= 4 else 8]
        return not bool((self.scales.contiguous().view(torch.int32) & spare).any())

    def _dense(self, group_of: Tensor, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(self.codes.shape, dtype=dtype)
        step = max(1, CHUNK // self.codes.shape[1])
        for start in range(0, len(self.codes), step):
            rows = slice(start, start + step)
            differences = self.codes[rows].float() - self.zeros[rows].float()[:, group_of]
            whole[rows] = (differences * self.scales[rows][:, group_of]).to(dtype)
        return whole


def group_index(stored: Tensor, num_groups: int, group: int) -> Tensor | None:
    """Return the group of each input feature, or None if groups are contiguous.

    Raises FormatError for groups that do not exist.
    """
    index = stored.long()
    if bool((index == torch.arange(len(index)) // group).all()):
        return None
    if bool(((index < 0) | (index >= num_groups)).any()):
        raise FormatError(f"its g_idx names groups beyond its {num_groups}")
    return index


def from_words(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """Unpack codes `[num_rows, num_codes] uint8` from 32-bit words, lowest bits first. A code may span two words."""
    rows, place = words.contiguous().view(torch.uint8), torch.arange(num_codes) * bits
    low, shift = place // 8, place % 8
    high = (low + 1).clamp(max=rows.shape[1] - 1)
    pairs = rows[:, low].int() | rows[:, high].int() << 8
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def _bytes(scheme: ByteScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    codes = parts[WHOLE].view(torch.uint8) ^ 128
    rows, depth = codes.shape
    scales = _by_row(numbers(parts["scale"]), rows)
    zeros = torch.full_like(scales, 128, dtype=torch.int16)
    if "zero_point" in parts:
        zeros = _by_row(parts["zero_point"], rows).to(torch.int16) + 128
    return Integers(codes, zeros, scales, 8, scheme.group or depth).weight(dtype)


def _packed_rows(scheme: PackedScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    bits, group = scheme.bits, scheme.group
    rows, words = parts["packed"].shape
    said_rows, depth = parts["shape"].tolist()
    if said_rows != rows or not words - 1 < depth * bits / 32 <= words:
        raise FormatError(f"its part 'shape' says {[said_rows, depth]}, its part 'packed' is {[rows, words]} words")
    scales = _by_row(numbers(parts["scale"]), rows)
    if group is not None and scales.shape[1] != -(-depth // group):
        raise FormatError(f"its part 'shape' says {[said_rows, depth]}, its part 'scale' is {list(scales.shape)}")
    codes = from_words(parts["packed"], bits, depth)
    size = group or depth
    index = parts.get("g_idx")  # if all are -1, the index is not used
    is_used = index is not None and bool((index != -1).any())
    group_of = group_index(index, scales.shape[1], size) if index is not None and is_used else None
    return Integers(codes, _zeros(parts, bits, scales), scales, bits, size, group_of).weight(dtype)


def _zeros(parts: Parts, bits: int, scales: Tensor) -> Tensor:
    middle = 1 << (bits - 1)
    stored = parts.get("zero_point")
    if stored is None:
        return torch.full_like(scales, middle, dtype=torch.int16)
    if stored.dtype == torch.int8:
        return _by_row(stored, len(scales)).to(torch.int16) + middle
    return from_words(stored.T, bits, len(scales)).T.to(torch.int16)


def _by_row(values: Tensor, rows: int) -> Tensor:
    if values.dim() == 2 and values.shape[0] == rows:
        return values
    return values.reshape(-1, 1).expand(rows, 1).contiguous()


def _gptq(scheme: GPTQScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    bits = scheme.bits
    scales = numbers(parts["scales"]).T.contiguous()
    num_columns, num_groups = scales.shape
    depth = parts["qweight"].shape[0] * 32 // bits
    codes = from_words(parts["qweight"].T, bits, depth)
    zeros = from_words(parts["qzeros"], bits, num_columns).T.to(torch.int16) + scheme.zero_is_less
    size = scheme.group or depth
    group_of = group_index(parts["g_idx"], num_groups, size) if "g_idx" in parts else None
    return Integers(codes, zeros, scales, bits, size, group_of).weight(dtype)


def _awq(scheme: AWQScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    scales = numbers(parts["scales"]).T.contiguous()
    codes, zeros = (_in_order(parts[name], len(scales)) for name in ("qweight", "qzeros"))
    return Integers(codes, zeros.to(torch.int16), scales, 4, scheme.group or codes.shape[1]).weight(dtype)


def _in_order(words: Tensor, num_columns: int) -> Tensor:
    codes = from_words(words, 4, num_columns)
    ordered: Tensor = codes.unflatten(1, (-1, 8))[..., ORDER].flatten(1)
    return ordered.T.contiguous()


# Decodes 8-bit and 4-bit floats.

NAN = 0x7F  # e4m3's code for NaN, without its sign bit
BIAS = 127  # bias of 8-bit exponents (e8m0)


def _floats(scheme: FloatScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    """Return a matrix, or the experts of one tensor. Raises FormatError for NaN."""
    codes, scales, block = parts[WHOLE].view(torch.uint8), numbers(parts[scheme.scale]), scheme.block
    if bool(((codes & NAN) == NAN).any()):
        raise FormatError("its codes are not all numbers: the file is damaged")
    if codes.dim() == 2:
        return _matrix(codes, scales, block, dtype)
    whole = torch.empty(codes.shape, dtype=dtype)
    for expert, each in enumerate(codes):
        whole[expert] = plain(_matrix(each, scales[expert], block, dtype))
    return whole


def _matrix(codes: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Weight:
    rows, depth = codes.shape
    if block is None:
        return scaled("e4m3", codes, scales.reshape(-1, 1).expand(rows, 1).contiguous(), depth, dtype)
    return scaled("e4m3", codes, scales[torch.arange(rows) // block[0]], block[1], dtype)


def _nvfp4(scheme: NVFP4Scheme, parts: Parts, dtype: torch.dtype) -> Weight:
    """Return a matrix whose group scales are multiplied or divided by the common scale."""
    groups, one = numbers(parts["scale"]), numbers(parts[scheme.whole]).reshape(())
    together = numbers(groups / one if scheme.is_divided else groups * one)
    return scaled("e2m1", parts[scheme.codes], together, NVFP4_GROUP, dtype)


def _mxfp4(_: MXFP4Scheme, parts: Parts, dtype: torch.dtype) -> Weight:
    return scaled("e2m1", parts["packed"], _powers(parts["scale"]), MXFP4_GROUP, dtype)


def _fp4(scheme: FP4Scheme, parts: Parts, dtype: torch.dtype) -> Weight:
    return scaled("e2m1", parts[WHOLE].view(torch.uint8), numbers(parts[scheme.scale]), MXFP4_GROUP, dtype)


def _experts(_: ExpertScheme, parts: Parts, dtype: torch.dtype) -> Weight:
    codes, scales = parts["blocks"].flatten(2).flatten(0, 1), _powers(parts["scales"]).flatten(0, 1)
    return PackedExperts("e2m1", codes, scales, dtype, num_experts=len(parts["blocks"]), is_transposed=True)


def _powers(exponents: Tensor) -> Tensor:
    if bool((exponents == 255).any()):
        raise FormatError("its scales are not all numbers: the file is damaged")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS)


DECODERS: dict[type, Callable[[Any, Parts, torch.dtype], Weight]] = {
    AWQScheme: _awq,
    ByteScheme: _bytes,
    ExpertScheme: _experts,
    FloatScheme: _floats,
    FP4Scheme: _fp4,
    GPTQScheme: _gptq,
    MXFP4Scheme: _mxfp4,
    NVFP4Scheme: _nvfp4,
    PackedScheme: _packed_rows,
}


def weight_of(scheme: Scheme, parts: Parts, dtype: torch.dtype) -> Weight:
    """Return a matrix in the run's dtype. Raises FormatError for damaged parts."""
    return DECODERS[type(scheme)](scheme, parts, dtype)
