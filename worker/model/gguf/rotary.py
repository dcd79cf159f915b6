"""The rotary positions of a GGUF model, as its `config.json` says them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from swiftbatch.worker.model.gguf.architectures import Config
from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, GGUFModel
from swiftbatch.worker.model.gguf.header import GGUFError

DEFAULT_BASE, LOCAL_BASE = 10_000.0, 10_000.0
SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
COMMON_KEYS = ("rope.dimension_count", "rope.freq_base", *SCALING)
ROTARY_KEYS = {"": COMMON_KEYS, "gemma3": (*COMMON_KEYS, "rope.freq_base_swa")}  # by architecture
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_of_gguf(model: GGUFModel, said: Mapping[str, Any], head_dim: int) -> Config:
    """The keys of the config that say how heads are turned. Raises GGUFError for a way that is not understood."""
    base, turned = _base(said.get("rope.freq_base", DEFAULT_BASE)), said.get("rope.dimension_count", head_dim)
    scaling = _scaling(model, said, head_dim, base)
    if model.name == "gemma3":
        local = _base(said.get("rope.freq_base_swa", LOCAL_BASE))
        whole = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
        return {
            "rope_parameters": {
                "full_attention": whole,
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            }
        }
    if turned != head_dim and model.name != "phi3":
        raise GGUFError(f"its metadata has {model.name}.rope.dimension_count = {turned!r:.80} for heads of {head_dim}")
    share = {"partial_rotary_factor": turned / head_dim} if turned != head_dim else {}
    return {"rope_theta": base, "rope_scaling": scaling, **share}


def shortest(value: float) -> float:
    """The shortest number that float32 rounds to this one: what was in the config that the file was written from."""
    return float(str(np.float32(value)))


def _base(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise GGUFError(f"its metadata has a rotary base of {value!r:.80}")
    return shortest(value)


def _scaling(model: GGUFModel, said: Mapping[str, Any], head_dim: int, base: float) -> Config | None:
    """The way in which angles are stretched; None for none. Raises GGUFError for one that is not understood."""
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
    """The numbers of Llama 3 that give these factors, one for each angle. Raises GGUFError where none do."""
    if (factors == 1).all():
        return None
    frequencies = base ** -(np.arange(0, head_dim, 2) / head_dim)
    longest, low, high = (
        LLAMA3["original_max_position_embeddings"],
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
    )
    factor = float(factors.max())
    smooth = ((longest * frequencies / (2 * math.pi) - low) / (high - low)).clip(0, 1)
    if len(factors) != len(frequencies) or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise GGUFError(f"its rotary positions are stretched by {FREQUENCIES}, whose numbers are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
