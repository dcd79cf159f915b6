"""Attention for models in training, registered with `transformers`: `model.set_attn_implementation(ATTENTION_NAME)`.

A forward over a segment of a long text gets what was read before as `earlier=EarlierSegments()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from swiftbatch.worker.kernels.causal_attention import causal_attention, is_fast

ATTENTION_NAME = "swiftbatch_training"
UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")  # options of layers that `causal_attention` has not


class EarlierSegments:
    """Keys and values, or states, of a text's segments that were read before, by layer; gradients stop there."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}  # each [1, num_kv_heads, length, head_dim]
        self._read: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}  # of recurrent layers: newest inputs, and the state

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with the next segment's heads to all of the text so far: `causal_attention` of these."""
        self._read[layer] = key.detach(), value.detach()
        return causal_attention(query, key, value, scaling, self._behind.get(layer))

    def state_of(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The newest inputs of a recurrent layer's convolution, and its state; None in front of the text."""
        return self._states.get(layer, (None, None))

    def keep_state(self, layer: int, inputs: Tensor, state: Tensor) -> None:
        """Keep those behind the segment that is read, for the next one. Each layer reads a segment once."""
        self._states[layer] = inputs.detach(), state.detach()

    def advance(self) -> None:
        """Put the segment that was read last behind the next one. Its length is a multiple of 64."""
        for layer, pair in self._read.items():
            behind = self._behind.get(layer)
            joined = pair if behind is None else [torch.cat(both, dim=2) for both in zip(behind, pair, strict=True)]
            self._behind[layer] = (joined[0], joined[1])


def attend_in_training(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    earlier: EarlierSegments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Whole sequences go to the compiled kernels, all else (masks, caches, dropout) to torch as under `sdpa`.

    `query [batch, num_heads, length, head_dim]`, returns `[batch, length, num_heads, head_dim]`. Under autocast the
    three are rounded to its dtype, as torch's own attention does.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if earlier is not None:
        return earlier.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None  # type: ignore[arg-type]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_whole = attention_mask is None and causal and query.shape[2] == key.shape[2] and key.shape == value.shape
    is_plain = dropout == 0.0 and all(kwargs.get(name) is None for name in UNKNOWN)
    if is_whole and is_plain and is_fast(query):
        return causal_attention(query, key, value, scale).transpose(1, 2), None
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, attend_in_training)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
