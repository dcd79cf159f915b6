"""The layer that predicts one more token in torch, as it is trained: DeepSeek-V3 (2024), section 2.2, for any kind.

Multi-token prediction (Gloeckle et al. 2024) with one layer that is used again and again. A row stands for one token of
the text. It takes the token's embedding and the target's final hidden state in front of it, and gives what the target's
head turns into logits of the next token, which is also the hidden state in front of the next row of a draft.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.formats.catalogue import CONFIG_KEYS
from swiftbatch.worker.model.predictors import ONE_LAYER, OWN, ROLES, one_layer_config
from swiftbatch.worker.model.text_view import Config


class PredictorModule(nn.Module):
    """Two norms, a linear layer, and a model of one layer of the target's kind with its norm."""

    def __init__(self, config: Config) -> None:
        """`config`: the text model's."""
        super().__init__()
        one = {key: value for key, value in one_layer_config(config).items() if key not in CONFIG_KEYS}
        made = AutoConfig.for_model(one.pop("model_type"), **one)
        self._config = deepcopy(made)
        self.decoder = decoder_of(
            AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="sdpa")
        )
        self.decoder.embed_tokens = None
        self.token_norm, self.hidden_norm = deepcopy(self.decoder.norm), deepcopy(self.decoder.norm)
        self.join = nn.Linear(2 * made.hidden_size, made.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Compute what the head takes, `[batch, num_rows, hidden]`, from inputs of that shape."""
        joined = self.join(torch.cat([self.token_norm(embeddings), self.hidden_norm(hidden)], dim=-1))
        output: torch.Tensor = self.decoder(inputs_embeds=joined, use_cache=False).last_hidden_state
        return output

    def begin_as(self, decoder: Any) -> None:
        """Begin with a model's norm and its last layer of the same form, on the sum of both inputs: sooner trained."""
        own = {name: each.shape for name, each in self.decoder.layers[0].state_dict().items()}
        for layer in reversed(decoder.layers):
            if {name: each.shape for name, each in layer.state_dict().items()} == own:
                self.decoder.layers[0].load_state_dict(layer.state_dict())
                break
        self.decoder.norm.load_state_dict(decoder.norm.state_dict())
        both = torch.eye(self.join.out_features, device=self.join.weight.device).repeat(1, 2)
        self.join.weight.data.copy_(both / 2)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights by the names of a file of weights: those of its layer as the kind is published."""
        model = AutoModelForCausalLM.from_config(deepcopy(self._config), dtype=torch.float32)
        decoder_of(model).layers[0].load_state_dict(self.decoder.layers[0].state_dict())
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size="1TB")  # it knows how its class joins what files have apart
            written = load_file(Path(folder) / "model.safetensors")
        own = {"final_norm": self.decoder.norm, **{role: getattr(self, role) for role in ROLES[:-1]}}
        layer = {name: tensor for name, tensor in written.items() if name.startswith(ONE_LAYER)}
        return layer | {f"{OWN}{role}.weight": part.weight.detach() for role, part in own.items()}
