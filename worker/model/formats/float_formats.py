"""Formats of 8-bit floats (e4m3) and 4-bit floats (e2m1) with scales: FP8, NVFP4 and MXFP4. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.formats.contract import (
    WHERE,
    WHOLE,
    Format,
    FormatError,
    Scheme,
    StoredTensor,
    fits,
    form_of,
    mapping,
    matrix_shape,
    one_of,
    only,
    part,
    refuse_unknown,
    scale_shapes,
    two_sizes,
)

E4M3 = "F8_E4M3"
BYTES, PAIRS = "U8", "I8"
NVFP4_GROUP, MXFP4_GROUP = 16, 32
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class FloatScheme:
    """`weight` of e4m3, with scales of blocks, of rows, or of the whole matrix.

    Experts in one tensor have a leading dimension.
    """

    scale: str
    block: tuple[int, int] | None = None

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, WHOLE, self.scale)
        shape, scales = part(heads, WHOLE, E4M3).shape, part(heads, self.scale, *SCALES).shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise FormatError(f"it is stored in the shape {list(shape)}; expected a matrix")
        fits(self.scale, scales, *self._grids(shape))
        form = form_of("e4m3", 8, shape[1], self.block and self.block[1]) if len(shape) == 2 else None
        return StoredTensor(E4M3, shape, form)

    def _grids(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *front, rows, columns = shape
        if self.block is not None:
            return [(*front, -(-rows // self.block[0]), -(-columns // self.block[1]))]
        if front:
            return [(*front,), (*front, 1, 1), (*front, rows, 1)]
        return scale_shapes(rows, columns, None)


@dataclass(frozen=True)
class NVFP4Scheme:
    """Two e2m1 codes per byte, an e4m3 scale per 16 codes, and the common scale `whole`."""

    codes: str
    whole: str
    is_divided: bool

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, self.codes, "scale", self.whole)
        rows, depth = _shape(part(heads, self.codes, BYTES), NVFP4_GROUP)
        fits("scale", part(heads, "scale", E4M3).shape, (rows, depth // NVFP4_GROUP))
        fits(self.whole, part(heads, self.whole, "F32").shape, (), (1,), (1, 1))
        return StoredTensor("NVFP4", (rows, depth), form_of("e2m1", 4, depth, NVFP4_GROUP))


class MXFP4Scheme:
    """Two e2m1 codes per byte, and an exponent per 32 codes."""

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, "packed", "scale")
        rows, depth = _shape(part(heads, "packed", BYTES), MXFP4_GROUP)
        fits("scale", part(heads, "scale", BYTES).shape, (rows, depth // MXFP4_GROUP))
        return StoredTensor("MXFP4", (rows, depth), form_of("e2m1", 4, depth, MXFP4_GROUP))


@dataclass(frozen=True)
class FP4Scheme:
    """`weight` of two e2m1 codes per byte, and a power of two per 32 codes, beside FP8 (DeepSeek V4)."""

    scale: str

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, WHOLE, self.scale)
        rows, depth = _shape(part(heads, WHOLE, PAIRS), MXFP4_GROUP)
        fits(self.scale, part(heads, self.scale, "F8_E8M0").shape, (rows, depth // MXFP4_GROUP))
        return StoredTensor("MXFP4", (rows, depth), form_of("e2m1", 4, depth, MXFP4_GROUP))


class ExpertScheme:
    """Experts in one tensor `[num_experts, rows, num_groups, 16]`; decoded, they are transposed."""

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, "blocks", "scales")
        blocks, scales = part(heads, "blocks", BYTES).shape, part(heads, "scales", BYTES).shape
        if len(blocks) != 4 or 0 in blocks or blocks[-1] * 2 != MXFP4_GROUP:
            raise FormatError(f"its part 'blocks' has the shape {list(blocks)}; expected 4 dimensions, the last of 16")
        fits("scales", scales, blocks[:-1])
        depth = blocks[2] * MXFP4_GROUP
        return StoredTensor("MXFP4", (blocks[0], depth, blocks[1]), form_of("e2m1", 4, depth, MXFP4_GROUP))


def _shape(codes: StoredTensor, group: int) -> tuple[int, int]:
    rows, width = matrix_shape(codes)
    if width * 2 % group:
        raise FormatError(f"it has {width * 2} columns; expected a multiple of {group}")
    return rows, width * 2


# FP8 as Qwen, DeepSeek, MiniMax and GLM publish it: `quant_method: fp8`.

FP8_SUFFIXES = {"_scale_inv": "scale_inv", "_scale": "scale", ".scale": "scale"}  # weights are multiplied by one
OWN_ENDINGS = {".scale": ".weight"}
# `activation_scheme` is for engines that quantize activations, too. Stored tensors tell which modules are packed.
FP8_KEYS = (
    *("quant_method", "activation_scheme", "fmt", "scale_fmt", "expert_dtype", "weight_block_size", "dequantize"),
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "kv_cache_scheme"),
)


def read_fp8(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, FP8_KEYS, WHERE)
    one_of(said, "fmt", (None, "e4m3", "float8_e4m3fn"), WHERE)
    one_of(said, "scale_fmt", (None, "float", "ue8m0"), WHERE)
    experts = one_of(said, "expert_dtype", (None, "fp8", "fp4"), WHERE)
    block = None if said.get("weight_block_size") is None else two_sizes(said, "weight_block_size", WHERE)
    shared = "a scale per tensor or row" if block is None else f"blocks of {block[0]} x {block[1]}"

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        scale, stored = "scale" if "scale" in heads else "scale_inv", heads[WHOLE].dtype if WHOLE in heads else None
        if stored == PAIRS and experts == "fp4":
            return FP4Scheme(scale)
        return FloatScheme(scale, block) if stored == E4M3 else None

    words = f"FP8 (e4m3, {shared})" + ("; experts in FP4 (e2m1, an exponent for 32)" if experts == "fp4" else "")
    return Format("fp8", words, FP8_SUFFIXES, scheme_of, own_endings=OWN_ENDINGS)


# FP8 and NVFP4 as NVIDIA's ModelOpt writes them.

MODELOPT_SUFFIXES = {"_scale": "scale", "_scale_2": "scale_2"}
FP8: tuple[str, Scheme, str] = (E4M3, FloatScheme("scale"), "FP8 (e4m3, a scale per tensor or row)")
NVFP4 = (BYTES, NVFP4Scheme(WHOLE, "scale_2", is_divided=False), "NVFP4 (e2m1, a scale for 16)")
SCHEMES: dict[str, tuple[str, Scheme, str]] = {  # algorithm -> stored code, scheme, words
    "FP8": FP8,
    "NVFP4": NVFP4,
    # other activations, which are never quantized here, and the same weights
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
}
MIXED = "MIXED_PRECISION"
# scales of keys and values are for engines that quantize their cache; they do not change weights
MODELOPT_KEYS = (
    *("quant_method", "quant_algo", "producer", "group_size", "exclude_modules", "ignore", "config_groups"),
    *("kv_cache_quant_algo", "kv_cache_scheme", "quantized_layers", "has_zero_point", "moe_quant_algo"),
)


def read_modelopt(said: Mapping[str, Any]) -> Format:
    where = "its quantization by ModelOpt"
    refuse_unknown(said, MODELOPT_KEYS, where)
    one_of(said, "group_size", (None, NVFP4_GROUP), where)
    schemes = sorted({SCHEMES[each] for each in _algorithms(said, where)}, key=lambda scheme: scheme[2])
    known = {code: scheme for code, scheme, _ in schemes}

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        return known.get(heads[WHOLE].dtype) if WHOLE in heads else None

    return Format("modelopt", "; ".join(words for _, _, words in schemes), MODELOPT_SUFFIXES, scheme_of)


def read_fp8_beside_nvfp4(said: Mapping[str, Any]) -> Format:
    """Read FP8 of which ModelOpt quantized the experts again, to NVFP4 (DeepSeek V4)."""
    refuse_unknown(said, (*FP8_KEYS, *MODELOPT_KEYS), WHERE)
    fp8 = read_fp8({key: each for key, each in said.items() if key in FP8_KEYS and key != "expert_dtype"})
    nvfp4 = read_modelopt({key: each for key, each in said.items() if key in MODELOPT_KEYS})
    if others := set(map(str, _algorithms(said, WHERE))) - {"NVFP4"}:
        raise FormatError(f"{WHERE} has quant_algo = {min(others)!r:.80} beside FP8; expected NVFP4")

    def scheme_of(name: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        return nvfp4.scheme_of(name, heads) or fp8.scheme_of(name, heads)

    words = f"{fp8.words}; experts in {nvfp4.words}"
    return Format("fp8", words, FP8_SUFFIXES | MODELOPT_SUFFIXES, scheme_of, own_endings=OWN_ENDINGS)


def _algorithms(said: Mapping[str, Any], where: str) -> list[Any]:
    named = [said.get("quant_algo")]
    if named == [MIXED]:
        layers = mapping(said.get("quantized_layers"), f"{where}, quantized_layers,")
        named = [mapping(layer, f"{where}, {shown(name)},").get("quant_algo") for name, layer in layers.items()]
    for each in named:
        if not isinstance(each, str) or each not in SCHEMES:
            raise FormatError(f"{where} has quant_algo = {each!r:.80}; expected {', '.join(SCHEMES)}")
    return named


# MXFP4 as in gpt-oss: experts in blocks of 32 with an exponent.

MXFP4_SUFFIXES = {"_blocks": "blocks", "_scales": "scales"}
MXFP4_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")


def read_mxfp4(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, MXFP4_KEYS, WHERE)
    words, scheme = "MXFP4 (e2m1, an exponent for 32)", ExpertScheme()
    return Format("mxfp4", words, MXFP4_SUFFIXES, lambda _, heads: scheme if "blocks" in heads else None)
