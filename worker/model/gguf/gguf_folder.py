"""The folder in the user's cache that makes a GGUF file a model folder: small derived files, and links to weights.

Its `config.json`, made of the metadata, is that of the dequantized twin.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.architectures.catalogue import GGUF_KINDS
from swiftbatch.worker.model.config_values import MOST_REAL, line_of
from swiftbatch.worker.model.gguf.gguf_model import (
    FREQUENCIES,
    INDEX_FILE,
    GGUFModel,
    link_name,
    read_gguf,
    transformers_name,
    write_index,
)
from swiftbatch.worker.model.gguf.gguf_tokenizer import (
    SPECIAL,
    TOKENIZER_FILES,
    generation_of,
    refuse_unknown_split,
    save_tokenizer,
    token_of,
)
from swiftbatch.worker.model.gguf.header import GGUFError
from swiftbatch.worker.model.user_cache import cache_folder, made_whole

FOLDERS = "gguf"
FORM = 2  # version of the derived files
NAME_LENGTH = 32
MAX_WORDS = 500  # characters of an error
LIBRARIES = ("transformers", "tokenizers")  # versions of these affect the tokenizer's files


def gguf_folder(model: str, file: Path, with_tokenizer: bool) -> Path:
    """Return the folder of the model whose first weight file is `file`. Raises ModelError."""
    try:
        read = read_gguf(file)
        folder = cache_folder(FOLDERS) / _key(read)
        if not (folder / INDEX_FILE).exists():
            _refuse_unknown_tensors(read)
            refuse_unknown_split(read)
            with made_whole(folder) as aside:
                _write_small_files(read, aside)
    except GGUFError as error:
        raise ModelError(f"model {model}: {file} is no GGUF file that runs here: {line_of(error, MAX_WORDS)}") from None
    except OSError as error:
        raise ModelError(
            f"model {model}: its small files can't be kept in {cache_folder(FOLDERS)} ({error}); set XDG_CACHE_HOME"
        ) from None
    if with_tokenizer and not all((folder / name).exists() for name in TOKENIZER_FILES):
        _add_tokenizer(model, folder, read)
    return folder


def _key(model: GGUFModel) -> str:
    """Return a hash of everything that determines the content of the folder."""
    parts = [FORM, *map(version, LIBRARIES), *(head.sha256 for head in model.heads), *map(os.path.abspath, model.files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:NAME_LENGTH]


def _refuse_unknown_tensors(model: GGUFModel) -> None:
    for name in model.tensors:
        if name != FREQUENCIES:
            transformers_name(name, model.form)


def _write_small_files(model: GGUFModel, folder: Path) -> None:
    _write_json(folder / "config.json", config_of(model))
    _write_json(folder / "generation_config.json", generation_of(model))
    if isinstance(template := model.metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    links = {link_name(number, len(model.files)): file for number, file in enumerate(model.files)}
    for name, file in links.items():
        (folder / name).symlink_to(os.path.abspath(file))
    write_index(folder, model.name, list(links))


def _add_tokenizer(model: str, folder: Path, read: GGUFModel) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        try:
            save_tokenizer(read, Path(aside))
        except Exception as error:  # any kind: the library raises plain exceptions
            said = f"{type(error).__name__}: {line_of(error, MAX_WORDS)}"
            raise ModelError(f"model {model}: no tokenizer comes of its metadata: {said}") from error
        for name in TOKENIZER_FILES:
            os.replace(Path(aside) / name, folder / name)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


# The config, made of the metadata.

Config = dict[str, Any]

SIZES = {  # keys that all architectures have, without the architecture's name
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
DEFAULT_BASE, LOCAL_BASE = 10_000.0, 10_000.0
SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
ROTARY_KEYS = ("rope.dimension_count", "rope.freq_base", *SCALING)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_of_gguf(model: GGUFModel, said: Mapping[str, Any], head_dim: int) -> Config:
    """Return the config keys for rotary positions. Raises GGUFError."""
    base, turned = _rotary_base(said.get("rope.freq_base", DEFAULT_BASE)), said.get("rope.dimension_count", head_dim)
    scaling = _scaling(model, said, head_dim, base)
    if model.form.local_base is not None:
        local = _rotary_base(said.get(model.form.local_base, LOCAL_BASE))
        whole = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
        return {
            "rope_parameters": {
                "full_attention": whole,
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            }
        }
    if turned != head_dim and not model.form.turns_parts:
        raise GGUFError(f"its metadata has {model.name}.rope.dimension_count = {turned!r:.80} for heads of {head_dim}")
    share = {"partial_rotary_factor": turned / head_dim} if turned != head_dim else {}
    return {"rope_theta": base, "rope_scaling": scaling, **share}


def shortest(value: float) -> float:
    """Return the float with the fewest digits that rounds to `value` in float32."""
    return float(str(np.float32(value)))


def _rotary_base(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise GGUFError(f"its metadata has a rotary base of {value!r:.80}")
    return shortest(value)


def _scaling(model: GGUFModel, said: Mapping[str, Any], head_dim: int, base: float) -> Config | None:
    """Return the rotary scaling, or None if there is none. Raises GGUFError."""
    kind, factor, original = (said.get(key) for key in SCALING)
    if FREQUENCIES in model.tensors:
        if kind not in (None, "none"):
            raise GGUFError(f"its rotary positions are stretched twice, by {FREQUENCIES} and as {kind!r:.80}")
        return _llama3(model.floats(FREQUENCIES), head_dim, base)
    if kind in (None, "none") or (factor in (None, 0, 1) and kind == "linear"):
        return None
    if kind not in ("linear", "yarn") or not isinstance(factor, float) or not 1 <= factor < math.inf:
        way = f"{kind!r:.80} by {factor!r:.80}"
        raise GGUFError(f"its rotary positions are stretched as {way}, which is not understood here")
    scaling = {"rope_type": kind, "factor": shortest(factor)}
    if kind == "linear":
        return scaling
    if not isinstance(original, int) or original < 1:
        raise GGUFError(f"its metadata lacks {model.name}.rope.scaling.original_context_length")
    return scaling | {"original_max_position_embeddings": original}


def _llama3(factors: np.ndarray, head_dim: int, base: float) -> Config | None:
    """Find Llama 3's rotary parameters from its frequency factors. Raises GGUFError."""
    if (factors == 1).all():
        return None
    frequencies = base ** -(np.arange(0, head_dim, 2) / head_dim)
    low, high, longest = LLAMA3.values()
    factor = float(factors.max())
    smooth = ((longest * frequencies / (2 * math.pi) - low) / (high - low)).clip(0, 1)
    if len(factors) != len(frequencies) or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise GGUFError(f"its rotary positions are stretched by {FREQUENCIES}, whose numbers are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


OTHER_SIZES = ("attention.key_length", "attention.value_length", "vocab_size")
NO_CHANGE = ("rope.scaling.finetuned", "tensor_data_layout")
UNUSED = (None, 0, False)  # at these values, an unknown key does not change the forward


def config_of(model: GGUFModel) -> Config:
    """Return the model's config. Raises GGUFError for unsupported metadata."""
    form, said = model.form, _said(model)
    config: Config = {"model_type": GGUF_KINDS[model.name], **form.fixed}
    for key, name in (SIZES | dict(form.said)).items():
        if key in said or name in form.unsaid:
            config[name] = _scalar(said.get(key, form.unsaid.get(name)), f"{model.name}.{key}")
    config["num_key_value_heads"] = config.get("num_key_value_heads", config.get("num_attention_heads"))
    _refuse_missing(model, config)
    config["head_dim"] = _head_dim(said, config, model.name)
    config["vocab_size"] = _vocab_size(model, said)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    config |= {name: token_of(model, key) for name, key in SPECIAL.items()}
    if "attention_bias" in config:
        config["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
    config |= rotary_of_gguf(model, said, config["head_dim"])
    return config | form.completed(config)


def _said(model: GGUFModel) -> dict[str, Any]:
    """Return the architecture's metadata. Raises GGUFError for a key that may change a forward."""
    prefix = f"{model.name}."
    said = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
    known = {*SIZES, *model.form.said, *OTHER_SIZES, *NO_CHANGE, *ROTARY_KEYS, model.form.local_base}
    for key, value in said.items():
        if isinstance(value, float) and not abs(value) <= MOST_REAL:
            raise GGUFError(f"its metadata has {prefix}{key} = {value}")
        if key in known and isinstance(value, list | np.ndarray):
            raise GGUFError(f"its metadata has {prefix}{key} as {value!r:.60}, expected one number for all layers")
        if key not in known and not (isinstance(value, int | float) and value in UNUSED):
            raise GGUFError(f"its metadata has {prefix}{key} = {value!r:.60}, which may change a layer, not read here")
    return said


def _scalar(value: Any, key: str) -> Any:
    if isinstance(value, str):
        raise GGUFError(f"its metadata has {key} = {value!r:.60}, expected a number")
    return shortest(value) if isinstance(value, float) else value


def _refuse_missing(model: GGUFModel, config: Config) -> None:
    for key, name in (SIZES | dict(model.form.said)).items():
        if name not in config:
            raise GGUFError(f"its metadata lacks {model.name}.{key}")
        is_size = name not in ("rms_norm_eps", *model.form.said.values())
        if is_size and not (isinstance(config[name], int) and config[name] > 0):
            raise GGUFError(f"its metadata has {model.name}.{key} = {config[name]!r:.80}, expected a positive integer")
    if (number := config["num_hidden_layers"]) > len(model.tensors):
        raise GGUFError(f"it holds {len(model.tensors):,} tensors, fewer than its {number:,} layers")


def _head_dim(said: Mapping[str, Any], config: Config, name: str) -> int:
    head_dim = said.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if said.get("attention.value_length", head_dim) != head_dim or not isinstance(head_dim, int) or head_dim < 1:
        values = said.get("attention.value_length")
        widths = f"{head_dim!r:.80} and value_length = {values!r:.80}"
        raise GGUFError(f"its metadata has {name}.attention.key_length = {widths}")
    return head_dim


def _vocab_size(model: GGUFModel, said: Mapping[str, Any]) -> int:
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("it holds no tensor token_embd.weight of two dimensions")
    number = embedding.shape[0]
    if said.get("vocab_size", number) != number:
        found = said["vocab_size"]
        raise GGUFError(f"its metadata has {model.name}.vocab_size = {found!r:.80}, and its embedding {number:,} rows")
    return number
