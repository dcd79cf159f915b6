"""The format of a model's weights, and its tensors by their names in the text model. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from swiftbatch.worker.model.config_values import line_of, shown
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.file_checks import PICKLED, json_object
from swiftbatch.worker.model.formats.compressed_tensors import read_compressed_tensors
from swiftbatch.worker.model.formats.contract import UNUSED, Format, FormatError, Scheme, StoredTensor
from swiftbatch.worker.model.formats.float_formats import read_fp8, read_fp8_beside_nvfp4, read_modelopt, read_mxfp4
from swiftbatch.worker.model.formats.gptq_awq import read_awq, read_gptq
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX, stored_in_gguf
from swiftbatch.worker.model.gguf.header import BITS, GGUFError
from swiftbatch.worker.model.text_config import text_name, text_view

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
QUANTIZATION_FILE = "hf_quant_config.json"  # ModelOpt writes it
CONFIG_KEYS = ("quantization_config", "compression_config")
FLOATS = ("BF16", "F16", "F32", "F64")
MOST_SAID = 300  # characters of an error's text
PLAIN = "weights in bfloat16, float16, float32 or float64"


def format_of(config: Mapping[str, Any], path: Path) -> Format | None:
    """Return the format of a model's weights, or None for plain weights. Raises FormatError."""
    in_config = next(((key, config[key]) for key in CONFIG_KEYS if config.get(key) is not None), None)
    in_file = _of_modelopt(path / QUANTIZATION_FILE)
    if in_config is None:
        return None if in_file is None else read_modelopt(in_file)
    key, said = in_config
    method = _method(said)
    if not isinstance(said, dict) or not isinstance(method, str) or method not in FORMATS:
        raise FormatError(
            f"its weights are quantized (config.json has {key}, {method!r:.80}); expected weights in bfloat16, "
            f"float16, float32 or float64, or one of the formats {', '.join(FORMATS)}"
        )
    is_of_modelopt = method == "modelopt" or (method == "fp8" and said.get("quant_algo") is not None)
    if in_file is not None and (not is_of_modelopt or in_file.get("quant_algo") != said.get("quant_algo")):
        raise FormatError(
            f"its config.json says {method!r:.80}, {said.get('quant_algo')!r:.80}, its {QUANTIZATION_FILE} says "
            f"{in_file.get('quant_algo')!r:.80}; two formats in one checkpoint are not read here"
        )
    if method == "fp8" and is_of_modelopt:
        return read_fp8_beside_nvfp4(said)
    beside = {key: config[key] for key in ("expert_dtype",) if method == "fp8" and config.get(key) is not None}
    return FORMATS[method](beside | said)


def _method(said: Any) -> Any:
    """Return the name of a format. Configs of older ModelOpt versions have no name."""
    if not isinstance(said, dict):
        return said
    producer = said.get("producer")
    if said.get("quant_method") is None and isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    return said.get("quant_method")


def _of_modelopt(file: Path) -> Mapping[str, Any] | None:
    if not file.exists():
        return None
    said, fault = json_object(file)
    if fault:
        raise FormatError(fault)
    how = said.get("quantization")
    if not isinstance(how, dict):
        raise FormatError(f"its weights are quantized ({QUANTIZATION_FILE} has {how!r:.80}); expected an object")
    return how


@dataclass(frozen=True)
class PackedTensor:
    """A matrix that is stored in parts: the stored name of each part."""

    name: str  # the matrix's name in the text model
    scheme: Scheme
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """The tensors of a text model, and their packed parts."""

    format: Format | None
    heads: Mapping[str, StoredTensor]  # keys are names in the text model; a packed matrix has one entry
    packed: tuple[PackedTensor, ...]
    names: Mapping[str, str]  # stored name -> name, for plain tensors
    repeated: frozenset[str]  # stored names that occur more than once


def layout_in(path: Path, config: Mapping[str, Any]) -> Layout:
    """Return the layout of a model folder. Raises FormatError."""
    stored = [pair for file in weight_files(path) for pair in heads_in(file).items()]
    return layout_of(stored, config, format_of(text_view(config), path))


def heads_in(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a file. Raises FormatError, also if the file is truncated."""
    if file.suffix == PICKLED:
        return _heads_in_pickle(file)
    try:
        if file.suffix == SUFFIX:
            return dict(stored_in_gguf(file))
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            return {name: StoredTensor(str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()}
    except (OSError, SafetensorError, GGUFError) as error:
        raise FormatError(f"{file} is damaged or cut off ({line_of(error, MOST_SAID)}); copy it again") from None


def _heads_in_pickle(file: Path) -> dict[str, StoredTensor]:
    from swiftbatch.worker.model.pickled_weights import PickledError, stored_in_pickle  # need torch

    try:
        return dict(stored_in_pickle(file))
    except PickledError as error:
        raise FormatError(f"{file} {error}") from None


def layout_of(stored: Iterable[tuple[str, StoredTensor]], config: Mapping[str, Any], format_: Format | None) -> Layout:
    """Return the layout of stored tensors. Raises FormatError for parts of a matrix that do not fit together."""
    view, pairs = text_view(config), list(stored)
    named = {name: head for name, head in pairs if text_name(name, view) and not (format_ and UNUSED.search(name))}
    packed = [] if format_ is None else list(_packed(named, format_, view))
    in_parts = {name for each, _ in packed for name in each.parts.values()}
    plain = {name: str(text_name(name, view)) for name in named if name not in in_parts}
    for name in plain:
        if name.endswith("weight") and named[name].dtype not in (*FLOATS, *BITS):  # in GGUF files, all supported types
            raise FormatError(f"its weights have {shown(name)} as {named[name].dtype}; expected {PLAIN}")
    if format_ is not None and named and not packed:
        raise FormatError(f"its weights are quantized in {format_.name}, says its config, and none of them is")
    heads = {known: named[name] for name, known in plain.items()} | {each.name: head for each, head in packed}
    repeated = frozenset(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
    return Layout(format_, heads, tuple(each for each, _ in packed), plain, repeated)


def _packed(
    named: Mapping[str, StoredTensor], format_: Format, view: dict[str, Any]
) -> Iterable[tuple[PackedTensor, StoredTensor]]:
    groups: dict[str, dict[str, str]] = {}
    for name in named:
        matrix, part = format_.place(name)
        groups.setdefault(matrix, {})[part] = name
    for matrix, parts in groups.items():
        heads = {part: named[name] for part, name in parts.items()}
        try:
            if (scheme := format_.scheme_of(matrix, heads)) is not None:
                yield PackedTensor(str(text_name(matrix, view)), scheme, parts), scheme.head(heads)
        except FormatError as error:
            raise FormatError(f"its weights have {shown(matrix)} in {format_.name}, and {error}") from None
