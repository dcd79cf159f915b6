"""FP8 as Qwen, DeepSeek, MiniMax and GLM publish it: `quant_method: fp8`. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftbatch.worker.model.formats.contract import (
    WHOLE,
    Format,
    FormatError,
    Scheme,
    StoredTensor,
    one_of,
    refuse_unknown,
)
from swiftbatch.worker.model.formats.float_rows import E4M3, FloatScheme

WHERE = "its quantization_config"
SUFFIXES = {"_scale_inv": "scale_inv", "_scale": "scale"}  # weights are multiplied by either
# `activation_scheme` is for engines that quantize activations, too. Stored tensors tell which modules are packed.
KNOWN = (
    *("quant_method", "activation_scheme", "fmt", "scale_fmt", "expert_dtype", "weight_block_size", "dequantize"),
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "kv_cache_scheme"),
)


def read_fp8(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, KNOWN, WHERE)
    one_of(said, "fmt", (None, "e4m3", "float8_e4m3fn"), WHERE)
    one_of(said, "scale_fmt", (None, "float", "ue8m0"), WHERE)
    one_of(said, "expert_dtype", (None, "fp8"), WHERE)
    block = _block(said.get("weight_block_size"))
    shared = "a scale per tensor or row" if block is None else f"blocks of {block[0]} x {block[1]}"

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        if WHOLE not in heads or heads[WHOLE].dtype != E4M3:
            return None
        return FloatScheme("scale" if "scale" in heads else "scale_inv", block)

    return Format("fp8", f"FP8 (e4m3, {shared})", SUFFIXES, scheme_of)


def _block(said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    if not isinstance(said, list) or len(said) != 2 or not all(type(each) is int and 0 < each < 2**31 for each in said):
        raise FormatError(f"{WHERE} has weight_block_size = {said!r:.80}; expected two positive integers")
    return said[0], said[1]
