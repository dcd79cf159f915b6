"""The attention that each layer of a model asks for, found by one small forward.

If a window, sink or soft cap were ignored, results would be wrong, so models with unknown ones are refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.architectures.catalogue import MIXER_CLASSES, layer_types
from swiftbatch.worker.model.architectures.recurrent_layers import STATELESS
from swiftbatch.worker.model.causal_lm import decoder_of

NUM_SAMPLES = 16  # positions at which a span is compared with the model's own mask

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`transformers`' own: (batch index, head index, query positions, key positions) to whether one sees the other."""

OBSERVER_NAME = "swiftbatch_observer"
NUM_ROWS = 3
UNDERSTOOD = {"row_groups", "scaling", "softcap", "s_aux"}
SAID_BY_THE_MASK = {"sliding_window"}  # the mask already contains it, here and in `transformers`
NO_CHANGE = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits"}


class UnsupportedError(ValueError):
    """The model's attention is not supported. The text begins with "its"."""


@dataclass(frozen=True)
class Span:
    """The positions that a row sees: all, a window, or its own chunk."""

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0  # positions in the window (the row's own included) or in a chunk

    def first(self, position: int) -> int:
        if self.kind == "window":
            return max(0, position - self.size + 1)
        return position // self.size * self.size if self.kind == "chunk" else 0


FULL = Span()


def span_of(mask_function: MaskFunction, num_positions: int, device: torch.device) -> Span:
    """Find the span of a mask by its values. Raises UnsupportedError for other masks."""
    cut = bisect_left(range(num_positions), True, key=lambda position: _first(mask_function, position, device) > 0)
    if cut == num_positions:
        span = FULL
    else:
        first = _first(mask_function, cut, device)
        span = Span("chunk", cut) if first == cut > 1 else Span("window", cut)
    step = max(1, num_positions // NUM_SAMPLES)
    for position in sorted({0, 1, cut - 1, cut, cut + 1, *range(0, num_positions, step), num_positions - 1}):
        if 0 <= position < num_positions and _first(mask_function, position, device) != span.first(position):
            raise UnsupportedError("its mask is neither causal, nor a sliding window, nor chunks")
    return span


def _first(mask_function: MaskFunction, position: int, device: torch.device) -> int:
    """Find the first position that a row sees. Raises UnsupportedError if the row does not see all later ones."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(position + 2, device=device)
    sees = torch.as_tensor(mask_function(zero, zero, zero + position, keys)).expand(position + 2)
    first = position + 1 - int(sees.count_nonzero())
    if not 0 <= first <= position or not sees[first : position + 1].all():
        raise UnsupportedError("its mask shows a row others than the positions up to its own")
    return first


@dataclass(frozen=True)
class LayerNeeds:
    """The heads and sizes of a layer's cache, and what its rows see."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    span: Span
    has_model_dtype: bool  # all queries, keys and values of the layer have the model's dtype


class _Observer:
    """Replaces attention during one forward, and records its arguments."""

    def __init__(self, num_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layers: dict[int, LayerNeeds] = {}
        self._device = device
        self._dtype = dtype
        self._num_positions = num_positions
        self._spans: dict[int, Span] = {}  # id of a mask -> its span
        self._masks: dict[int, tuple[torch.Tensor, MaskFunction]] = {}  # id of a mask -> mask, and its function

    def mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> torch.Tensor:
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
        self._masks[id(mask)] = (mask, mask_function)
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **asked: Any,
    ) -> tuple[torch.Tensor, None]:
        known = UNDERSTOOD | SAID_BY_THE_MASK | NO_CHANGE
        if unknown := sorted(name for name, value in asked.items() if value is not None and name not in known):
            raise UnsupportedError(f"its attention asks for {', '.join(unknown)}")
        if "row_groups" not in asked:
            raise UnsupportedError("its layers hand nothing on to their attention")
        if id(attention_mask) not in self._masks:
            raise UnsupportedError("its layers use masks of their own")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise UnsupportedError("its layers share or hide their attention")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedError(f"it has {query.shape[1]} heads of queries for {key.shape[1]} of keys")
        span = self._span(id(attention_mask))
        has_model_dtype = {query.dtype, key.dtype, value.dtype} == {self._dtype}
        self.layers[layer] = LayerNeeds(key.shape[1], key.shape[3], value.shape[3], span, has_model_dtype)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _span(self, mask_id: int) -> Span:
        if mask_id not in self._spans:
            self._spans[mask_id] = span_of(self._masks[mask_id][1], self._num_positions, self._device)
        return self._spans[mask_id]


def recurrent_layers(model: Any) -> dict[int, Any]:
    """Return the recurrent parts of a model, by layer."""
    layers = enumerate(getattr(decoder_of(model), "layers", ()))
    parts = ((number, part) for number, layer in layers for part in layer.children())
    return {number: part for number, part in parts if type(part).__name__ in MIXER_CLASSES}


def form_of(part: Any) -> str:
    return MIXER_CLASSES[type(part).__name__]


def attention_of(layer: Any) -> Any:
    names = ((part, type(part).__name__) for part in layer.children())
    return next((part for part, name in names if name.endswith("Attention") and name not in MIXER_CLASSES), None)


def observe_layers(model: Any, name: str, num_positions: int) -> list[LayerNeeds]:
    """Return the needs of each attending layer. Raises ModelError for unsupported attention."""
    observer = _Observer(num_positions, model.device, model.dtype)
    AttentionInterface.register(OBSERVER_NAME, observer.attend)
    AttentionMaskInterface.register(OBSERVER_NAME, observer.mask)
    before = model.config._attn_implementation
    token_ids = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(OBSERVER_NAME)
        with torch.inference_mode():
            decoder_of(model)(input_ids=token_ids, use_cache=False, row_groups=[])
        return _in_order(model, observer.layers)
    except UnsupportedError as error:
        raise ModelError(f"model {name}: it needs an attention that is not supported: {error}") from error
    except Exception as error:  # any kind: a config's values reach code that never looked at them
        reason = " ".join(str(error).split())
        raise ModelError(f"model {name}: it cannot run {NUM_ROWS} tokens: {type(error).__name__}: {reason}") from error
    finally:
        model.set_attn_implementation(before)


def _in_order(model: Any, layers: dict[int, LayerNeeds]) -> list[LayerNeeds]:
    num_layers, types = model.config.num_hidden_layers, layer_types(model.config.to_dict()) or []
    stateless = {number for number, each in enumerate(types) if each in STATELESS}
    others = set(range(num_layers)) - set(layers) - set(recurrent_layers(model)) - stateless
    if others or not layers:
        num_others = len(others) or num_layers
        raise UnsupportedError(f"{num_others} of its {num_layers} layers keep another state than keys and values")
    if len({(needs.num_kv_heads, needs.key_dim, needs.value_dim) for needs in layers.values()}) > 1:
        raise UnsupportedError("the keys and values of its layers differ in their sizes")
    return [layers[number] for number in sorted(layers)]
