"""Matrices of numbers rounded to codes of 8 or 4 bits: to the nearest, with scales of groups, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftbatch.worker.model.formats.contract import StoredTensor

GROUP = 32  # columns that share a scale: divides the widths of nearly all models, and costs half a bit a weight
BLOCKS = (128, 64, 32)  # rows and columns of fp8's blocks: the first that divides all matrices, as other programs want
LARGEST_E4M3 = 448.0
SMALLEST = 1e-12  # a scale of a group of zeros
WORD = 32


class Rounding(Protocol):
    """One format: which matrices it takes, the parts of each, and what a config says of all."""

    def takes(self, rows: int, columns: int) -> bool:
        """Tell whether a matrix of this shape can be rounded."""

    def heads(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The parts of a matrix, by how their names go on behind the module's."""

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix in float32."""

    def config(self, left: list[str]) -> dict[str, Any]:
        """The quantization config of a model with these linear layers left as they are."""


@dataclass(frozen=True)
class IntegerRounding:
    """compressed-tensors' `pack-quantized`, groups of 32 columns, around 0.

    With zeros of their own, groups of 4 bits are no nearer in nats, and not all programs that read the format read
    those.
    """

    bits: int

    def takes(self, rows: int, columns: int) -> bool:
        return columns % GROUP == 0

    def heads(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {
            "weight_packed": StoredTensor("I32", (rows, columns * self.bits // WORD)),
            "weight_scale": StoredTensor("BF16", (rows, columns // GROUP)),
            "weight_shape": StoredTensor("I64", (2,)),
        }

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        groups, most = weight.unflatten(1, (-1, GROUP)), (1 << self.bits) - 1
        # Scales as they are stored: numbers are rounded with the scales that multiply them. The greatest number of a
        # group keeps its place. Steps that are finer by the one code that is left clip it, which costs more.
        scales = (groups.abs().amax(-1) / (most // 2)).clamp(min=SMALLEST).to(torch.bfloat16)
        codes = ((groups / scales.float()[..., None]).round() + (most + 1) // 2).clamp(0, most)
        return {
            "weight_packed": _words(codes.flatten(1), self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }

    def config(self, left: list[str]) -> dict[str, Any]:
        weights = {"num_bits": self.bits, "type": "int", "strategy": "group", "group_size": GROUP}
        weights |= {"symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
        return said | {"ignore": left, "kv_cache_scheme": None, "quantization_status": "compressed"}


@dataclass(frozen=True)
class FloatRounding:
    """FP8 (e4m3) in square blocks, as `quant_method: fp8` has it."""

    block: int

    def takes(self, rows: int, columns: int) -> bool:
        return True

    def heads(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        grid = (-(-rows // self.block), -(-columns // self.block))
        return {"weight": StoredTensor("F8_E4M3", (rows, columns)), "weight_scale_inv": StoredTensor("F32", grid)}

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % self.block, 0, -rows % self.block))
        blocks = padded.unflatten(0, (-1, self.block)).unflatten(2, (-1, self.block))
        scales = (blocks.abs().amax((1, 3)) / LARGEST_E4M3).clamp(min=SMALLEST)
        codes = (blocks / scales[:, None, :, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        stored = codes.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
        return {"weight": stored, "weight_scale_inv": scales}

    def config(self, left: list[str]) -> dict[str, Any]:
        said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return said | {"weight_block_size": [self.block, self.block], "modules_to_not_convert": left}


FORMATS = ("int4", "int8", "fp8")


def rounding_of(format_: str, shapes: Mapping[str, tuple[int, ...]]) -> Rounding:
    """The rounding of these matrices in a format of `FORMATS`."""
    if format_ != "fp8":
        return IntegerRounding(int(format_.removeprefix("int")))
    sizes = {size for shape in shapes.values() for size in shape}
    return FloatRounding(next((block for block in BLOCKS if all(size % block == 0 for size in sizes)), BLOCKS[0]))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes in 32-bit words, the lowest bits first."""
    grouped = codes.long().unflatten(1, (-1, WORD // bits)) << torch.arange(0, WORD, bits)
    words: Tensor = grouped.sum(-1).to(torch.int32)
    return words
