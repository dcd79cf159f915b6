"""A causal language model of `transformers` in two: its layers, and its head as the model itself applies it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast


def decoder_of(model: Any) -> Any:
    """The model without its head: from tokens to final hidden states."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


class Head:
    """The model's own forward behind its layers, with whatever scale or soft cap its class puts around the weights."""

    def __init__(self, model: Any) -> None:
        decoder = decoder_of(model)
        self._model = copy.copy(model)
        self._model._modules = {
            name: _GivenStates() if module is decoder else module for name, module in model._modules.items()
        }

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, hidden]` to `[num_rows, vocab] float32`."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


class _GivenStates(torch.nn.Module):
    """Stands for a model's layers: what goes in as embeddings comes out as final hidden states."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
