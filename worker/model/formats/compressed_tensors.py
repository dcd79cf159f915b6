"""compressed-tensors: groups of modules, each with a scheme of integers or floats. Without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
    form_of_integers,
    mapping,
    matrix_shape,
    one_of,
    only,
    part,
    positive,
    refuse_unknown,
    scale_shapes,
    two_sizes,
)
from swiftbatch.worker.model.formats.float_formats import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    FloatScheme,
    MXFP4Scheme,
    NVFP4Scheme,
)

SCALES = ("BF16", "F16", "F32")
WORD = 32  # bits


@dataclass(frozen=True)
class ByteScheme:
    """`weight` of int8, with scales and zero points for the whole matrix, for rows or for groups."""

    group: int | None

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, WHOLE, "scale", "zero_point")
        rows, depth = matrix_shape(part(heads, WHOLE, "I8"))
        scales = part(heads, "scale", *SCALES).shape
        fits("scale", scales, *scale_shapes(rows, depth, self.group))
        if "zero_point" in heads:
            fits("zero_point", part(heads, "zero_point", "I8").shape, scales)
        form = form_of_integers(8, depth, self.group, heads["scale"].dtype, is_centred="zero_point" not in heads)
        return StoredTensor("int8", (rows, depth), form)


@dataclass(frozen=True)
class PackedScheme:
    """`weight_packed`, where each row begins at a 32-bit word, and `weight_shape`."""

    bits: int
    group: int | None
    is_symmetric: bool

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, "packed", "scale", "zero_point", "shape", "g_idx")
        rows, words = matrix_shape(part(heads, "packed", "I32"))
        scales = part(heads, "scale", *SCALES).shape
        fits("shape", part(heads, "shape", "I64", "I32").shape, (2,))
        depth = self._depth(words, scales)
        fits("scale", scales, *scale_shapes(rows, depth, self.group))
        if "g_idx" in heads:
            fits("g_idx", part(heads, "g_idx", "I32", "I64").shape, (depth,))
        if self.is_symmetric == ("zero_point" in heads):
            raise FormatError(f"it has {'' if self.is_symmetric else 'no '}zero_point, unlike its config says")
        if not self.is_symmetric:
            self._check_zeros(heads, rows, scales)
        form = form_of_integers(self.bits, depth, self.group, heads["scale"].dtype, self.is_symmetric)
        return StoredTensor(f"int{self.bits}", (rows, depth), None if "g_idx" in heads else form)

    def _depth(self, words: int, scales: tuple[int, ...]) -> int:
        most = words * WORD // self.bits
        if self.group is None or len(scales) != 2:
            return most
        return min(most, scales[1] * self.group)

    def _check_zeros(self, heads: Mapping[str, StoredTensor], rows: int, scales: tuple[int, ...]) -> None:
        zeros = part(heads, "zero_point", "I32", "I8")
        packed = (-(-rows * self.bits // WORD), scales[-1] if len(scales) == 2 else 1)
        fits("zero_point", zeros.shape, *([packed] if zeros.dtype == "I32" else [scales]))


SUFFIXES = {
    "_packed": "packed",
    "_scale": "scale",
    "_zero_point": "zero_point",
    "_shape": "shape",
    "_g_idx": "g_idx",
    "_global_scale": "global_scale",
}
# the compression's status, and a scheme for engines that quantize their cache, do not change weights
KNOWN = (
    *("quant_method", "config_groups", "format", "ignore", "version", "quantization_status", "kv_cache_scheme"),
    "global_compression_ratio",
)
OF_GROUPS = ("targets", "weights", "input_activations", "output_activations", "format")
OF_WEIGHTS = (
    *("num_bits", "type", "strategy", "symmetric", "group_size", "block_structure", "dynamic", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)
PATTERN = "re:"  # prefix of a target that is a regular expression
CLASSES = ("Linear", "Embedding", "MoE")  # targets that are classes, not names of modules


@dataclass(frozen=True)
class _Weights:
    """The arguments that describe how the weights of a group are stored."""

    said: Mapping[str, Any]
    where: str

    @property
    def strategy(self) -> str:
        size = self.said.get("group_size")
        unsaid = "tensor" if size is None else "channel" if size == -1 else "group"
        return str(self.said.get("strategy") or unsaid)

    @property
    def group(self) -> int | None:
        return positive(self.said, "group_size", self.where) if self.strategy in ("group", "tensor_group") else None

    def of_type(self, type_: str, bits: tuple[int, ...], *strategies: str) -> int:
        """Return the bits per weight. Raises FormatError unless type, bits and strategy are among the given ones."""
        one_of(self.said, "type", (type_,), self.where)
        if self.strategy not in strategies:
            raise FormatError(f"{self.where} has strategy = {self.strategy!r:.80}; expected {' or '.join(strategies)}")
        found: int = one_of(self.said, "num_bits", bits, self.where)
        if type_ == "float":
            one_of(self.said, "symmetric", (None, True), self.where)
        return found


def _packed_rows(weights: _Weights) -> tuple[str, Scheme]:
    bits = weights.of_type("int", (2, 3, 4, 8), "tensor", "channel", "group")
    is_symmetric = weights.said.get("symmetric", True) is not False
    return f"int{bits}", PackedScheme(bits, weights.group, is_symmetric)


def _byte_rows(weights: _Weights) -> tuple[str, Scheme]:
    weights.of_type("int", (8,), "tensor", "channel", "group")
    return "int8, activations as they are", ByteScheme(weights.group)


def _float_rows(weights: _Weights) -> tuple[str, Scheme]:
    weights.of_type("float", (8,), "tensor", "channel", "block")
    block = two_sizes(weights.said, "block_structure", weights.where) if weights.strategy == "block" else None
    return "FP8 (e4m3)", FloatScheme("scale", block)


def _nvfp4(weights: _Weights) -> tuple[str, Scheme]:
    weights.of_type("float", (4,), "tensor_group")
    one_of(weights.said, "group_size", (NVFP4_GROUP,), weights.where)
    return "NVFP4", NVFP4Scheme("packed", "global_scale", is_divided=True)


def _mxfp4(weights: _Weights) -> tuple[str, Scheme]:
    weights.of_type("float", (4,), "group")
    one_of(weights.said, "group_size", (MXFP4_GROUP,), weights.where)
    return "MXFP4", MXFP4Scheme()


FORMS: dict[str, Callable[[_Weights], tuple[str, Scheme]]] = {
    "pack-quantized": _packed_rows,
    "int-quantized": _byte_rows,
    "float-quantized": _float_rows,
    "naive-quantized": lambda weights: (
        _float_rows(weights) if weights.said.get("type") == "float" else _byte_rows(weights)
    ),
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


def read_compressed_tensors(said: Mapping[str, Any]) -> Format:
    _refuse_other_compression(said)
    groups = mapping(said.get("config_groups"), f"{WHERE}, config_groups,")
    if not groups:
        raise FormatError(f"{WHERE} has no config_groups")
    read = [_group(each, said, f"{WHERE}, {shown(name)},") for name, each in groups.items()]
    words = dict.fromkeys(form for _, form, _ in read)

    def scheme_of(name: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        if "packed" not in heads and (WHOLE not in heads or heads[WHOLE].dtype not in ("I8", "F8_E4M3")):
            return None
        module = name.removesuffix(f".{WHOLE}")
        for is_wanted in (_names, _is_class):
            for targets, _, scheme in read:
                if is_wanted(module, targets):
                    return scheme
        raise FormatError("its module is in none of the config's groups")

    return Format("compressed-tensors", "; ".join(words), SUFFIXES, scheme_of)


def _refuse_other_compression(said: Mapping[str, Any]) -> None:
    """Raise FormatError for sparse or rotated weights, because the stored weights are not the model's matrices."""
    sparsity = said.get("sparsity_config") or {}
    if sparsity and mapping(sparsity, f"{WHERE}, sparsity_config,").get("format") not in (None, "dense"):
        form = f"{sparsity.get('format')!r:.80}"
        raise FormatError(f"{WHERE} has sparsity_config, {form}; sparse weights are not read here")
    refuse_unknown(said, (*KNOWN, "sparsity_config"), WHERE)


def _group(group: Any, whole: Mapping[str, Any], where: str) -> tuple[list[str], str, Scheme]:
    refuse_unknown(mapping(group, where), OF_GROUPS, where)
    form = group.get("format") or whole.get("format")
    if not isinstance(form, str) or form not in FORMS:
        raise FormatError(f"{where} has format = {form!r:.80}; expected {', '.join(FORMS)}")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise FormatError(f"{where} has targets = {targets!r:.80}; expected a list of names")
    if wrong := next((each for each in targets if each.startswith(PATTERN) and not _is_pattern(each)), None):
        raise FormatError(f"{where} has the target {wrong!r:.80}; expected a pattern behind {PATTERN}")
    weights = _Weights(mapping(group.get("weights"), f"{where} weights,"), f"{where} weights,")
    refuse_unknown(weights.said, OF_WEIGHTS, weights.where)
    one_of(weights.said, "dynamic", (None, False), weights.where)
    return targets, *FORMS[form](weights)


def _is_pattern(target: str) -> bool:
    try:
        re.compile(target.removeprefix(PATTERN))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _names(module: str, targets: list[str]) -> bool:
    return any(
        module == each or (each.startswith(PATTERN) and re.match(each.removeprefix(PATTERN), module))
        for each in targets
    )


def _is_class(_: str, targets: list[str]) -> bool:
    return any(each.startswith(CLASSES) or each.endswith("Linear") for each in targets)
