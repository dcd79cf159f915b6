"""Llama-Nemotron models from neural architecture search (NAS), made of the layers of transformers' Llama.

`transformers` has no class for them. Layers lack attention or MLP, or have MLPs of their own width: see `nas_blocks`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from swiftbatch.worker.model.architectures.nas_blocks import NASBlock, nas_blocks


class NASConfig(LlamaConfig):  # type: ignore[misc]
    """A Llama's config, with `block_configs` beside it."""

    model_type = "nemotron-nas"


class NASDecoderLayer(LlamaDecoderLayer):  # type: ignore[misc]
    def __init__(self, config: NASConfig, layer_idx: int, block: NASBlock) -> None:
        super().__init__(config, layer_idx)
        self.block = block
        own = copy.copy(config)  # attention keeps the model's, whose implementation may change
        own.intermediate_size = block.width
        if not block.group:
            del self.self_attn, self.input_layernorm
        if block.width:
            self.mlp = LlamaMLP(own)
        else:
            del self.mlp, self.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.block.group:
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        if self.block.width:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class NASModel(LlamaModel):  # type: ignore[misc]
    def __init__(self, config: NASConfig) -> None:
        super().__init__(config)
        blocks = enumerate(nas_blocks(vars(config)))
        self.layers = nn.ModuleList([NASDecoderLayer(config, number, block) for number, block in blocks])
        self.post_init()


class NASForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = NASConfig

    def __init__(self, config: NASConfig) -> None:
        super().__init__(config)
        self.model = NASModel(config)
        self.post_init()
