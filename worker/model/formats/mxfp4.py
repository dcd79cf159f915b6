"""MXFP4 as in gpt-oss: experts in blocks of 32 with an exponent. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftbatch.worker.model.formats.contract import (
    Format,
    FormatError,
    Scheme,
    StoredTensor,
    fits,
    form_of,
    only,
    part,
    refuse_unknown,
)
from swiftbatch.worker.model.formats.float_rows import BYTES, MXFP4_GROUP
from swiftbatch.worker.model.gguf.header import PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.quantized_weights import Weight

SUFFIXES = {"_blocks": "blocks", "_scales": "scales"}
KNOWN = ("quant_method", "modules_to_not_convert", "dequantize")


@dataclass(frozen=True)
class ExpertScheme:
    """Experts in one tensor `[num_experts, rows, num_groups, 16]`; decoded, they are transposed."""

    numbers: str = "MXFP4"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "blocks", "scales")
        blocks, scales = part(heads, "blocks", BYTES).shape, part(heads, "scales", BYTES).shape
        if len(blocks) != 4 or 0 in blocks or blocks[-1] * 2 != MXFP4_GROUP:
            raise FormatError(f"its part 'blocks' has the shape {list(blocks)}; expected 4 dimensions, the last of 16")
        fits("scales", scales, blocks[:-1])
        return blocks[0], blocks[2] * MXFP4_GROUP, blocks[1]

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        return form_of("e2m1", 4, self.shape(heads)[1], MXFP4_GROUP)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.dequantization import expert_weight

        return expert_weight(parts["blocks"], parts["scales"], dtype)


def read_mxfp4(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, KNOWN, "its quantization_config")
    return Format("mxfp4", "MXFP4 (e2m1, an exponent for 32)", SUFFIXES, _scheme_of)


def _scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
    return ExpertScheme() if "blocks" in heads else None
