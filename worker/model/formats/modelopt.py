"""FP8 and NVFP4 as NVIDIA's ModelOpt writes them. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.formats.contract import (
    WHOLE,
    Format,
    FormatError,
    Scheme,
    StoredTensor,
    mapping,
    one_of,
    refuse_unknown,
)
from swiftbatch.worker.model.formats.float_rows import BYTES, E4M3, NVFP4_GROUP, FloatScheme, NVFP4Scheme

SUFFIXES = {"_scale": "scale", "_scale_2": "scale_2"}
SCHEMES: dict[str, tuple[str, Scheme, str]] = {  # algorithm -> stored code, scheme, words
    "FP8": (E4M3, FloatScheme("scale"), "FP8 (e4m3, a scale per tensor)"),
    "NVFP4": (BYTES, NVFP4Scheme(WHOLE, "scale_2", is_divided=False), "NVFP4 (e2m1, a scale for 16)"),
}
MIXED = "MIXED_PRECISION"
# scales of keys and values are for engines that quantize their cache; they do not change weights
KNOWN = (
    *("quant_method", "quant_algo", "producer", "group_size", "exclude_modules", "ignore", "config_groups"),
    *("kv_cache_quant_algo", "kv_cache_scheme", "quantized_layers", "has_zero_point", "moe_quant_algo"),
)


def read_modelopt(said: Mapping[str, Any]) -> Format:
    where = "its quantization by ModelOpt"
    refuse_unknown(said, KNOWN, where)
    one_of(said, "group_size", (None, NVFP4_GROUP), where)
    algorithms = _algorithms(said, where)
    known = {SCHEMES[each][0]: SCHEMES[each][1] for each in algorithms}

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        return known.get(heads[WHOLE].dtype) if WHOLE in heads else None

    return Format("modelopt", "; ".join(SCHEMES[each][2] for each in algorithms), SUFFIXES, scheme_of)


def _algorithms(said: Mapping[str, Any], where: str) -> list[str]:
    named = [said.get("quant_algo")]
    if named == [MIXED]:
        layers = mapping(said.get("quantized_layers"), f"{where}, quantized_layers,")
        named = [mapping(layer, f"{where}, {shown(name)},").get("quant_algo") for name, layer in layers.items()]
    for each in named:
        if not isinstance(each, str) or each not in SCHEMES:
            raise FormatError(f"{where} has quant_algo = {each!r:.80}; expected {', '.join(SCHEMES)}")
    return sorted(set(map(str, named)))
