"""The supported formats of quantized weights, by their names in configs. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swiftbatch.worker.model.formats.compressed_tensors import read_compressed_tensors
from swiftbatch.worker.model.formats.contract import Format, FormatError
from swiftbatch.worker.model.formats.fp8 import read_fp8
from swiftbatch.worker.model.formats.gptq_awq import read_awq, read_gptq
from swiftbatch.worker.model.formats.modelopt import read_modelopt
from swiftbatch.worker.model.formats.mxfp4 import read_mxfp4

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
    if in_file is not None and (method != "modelopt" or in_file.get("quant_algo") != said.get("quant_algo")):
        raise FormatError(
            f"its config.json says {method!r:.80}, {said.get('quant_algo')!r:.80}, its {QUANTIZATION_FILE} says "
            f"{in_file.get('quant_algo')!r:.80}; two formats in one checkpoint are not read here"
        )
    return FORMATS[method](said)


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
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise FormatError(f"{file} is no JSON object")
    how = said.get("quantization")
    if not isinstance(how, dict):
        raise FormatError(f"its weights are quantized ({QUANTIZATION_FILE} has {how!r:.80}); expected an object")
    return how
