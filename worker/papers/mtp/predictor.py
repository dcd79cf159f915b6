"""The layer that predicts one more token: in torch, as it is trained, and its weights on disk.

Multi-token prediction (Gloeckle et al. 2024) with one layer that is used again and again. A row stands for one token of
the text. It takes the token's embedding and the target's final hidden state in front of it, and gives what the target's
head turns into logits of the next token, which is also the hidden state in front of the next row of a draft.

They are read beside the model's own and not hashed again: whatever they are, drafts change no token.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full_cache import CacheShape
from swiftbatch.worker.drafters.catalogue import MTP
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from swiftbatch.worker.kernels.layer_forms import NormForm
from swiftbatch.worker.kernels.packed_weights import Weight, plain
from swiftbatch.worker.kernels.rotary_frequencies import Rotary
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.dense_loading import layer_alone
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.formats.catalogue import CONFIG_KEYS
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.model_files import read_config
from swiftbatch.worker.model.mtp_layers import (
    ONE_LAYER,
    OWN,
    ROLES,
    NoPredictorError,
    Predictor,
    one_layer_config,
    predictor_in,
    predictor_of,
)
from swiftbatch.worker.model.text_config import Config
from swiftbatch.worker.model.weight_reading import Assembly
from swiftbatch.worker.target.target import TargetModel


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
        """Return weights by the names of a file of weights: those of the layer as the kind is published."""
        model = AutoModelForCausalLM.from_config(deepcopy(self._config), dtype=torch.float32)
        decoder_of(model).layers[0].load_state_dict(self.decoder.layers[0].state_dict())
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size="1TB")  # it knows how its class joins what files have apart
            written = load_file(Path(folder) / "model.safetensors")
        own = {"final_norm": self.decoder.norm, **{role: getattr(self, role) for role in ROLES[:-1]}}
        layer = {name: tensor for name, tensor in written.items() if name.startswith(ONE_LAYER)}
        return layer | {f"{OWN}{role}.weight": part.weight.detach() for role, part in own.items()}


@dataclass(frozen=True)
class PredictorWeights:
    """A layer with its sizes, and the float32 weights around it: norms `[hidden]`, `join [hidden, 2 * hidden]`."""

    sizes: DecoderSizes  # of one layer
    layer: LayerWeights
    rotary: Rotary
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: torch.Tensor  # the columns of the token's embedding first
    final_norm: torch.Tensor
    feeds_normed: bool

    def cache_shape(self, device: torch.device) -> CacheShape:
        """The shape of the layer's cache on a device."""
        sizes, num_parts = self.sizes, 2 if self.sizes.latent is None else 1
        return CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device, num_parts=num_parts)

    def joined(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute what the layer takes, `[num_rows, hidden] float32`, from inputs of that shape."""
        parts = (self._norm(embeddings, self.token_norm), self._norm(hidden, self.hidden_norm))
        return torch.nn.functional.linear(torch.cat(parts, dim=-1), self.join)

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        """Return the head's inputs, `[num_rows, hidden]` of the model's dtype, from what the layer gave in float32."""
        return self._norm(state, self.final_norm).to(self.sizes.dtype)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + self.sizes.epsilon) * weight


def load_predictor(parts_folder: Path | None, target: TargetModel) -> PredictorWeights:
    """The trained layer in a folder, None for the target's own, or else that of the target's checkpoint.

    Raises ModelError where there is none, or where it was made for another model.
    """
    files = target.files
    found = MTP.find(files.name, files.path, files.fingerprint, parts_folder)
    config = read_config(files.name, files.path)
    try:
        if found.is_file():
            predictor = predictor_of(heads_in(found).items(), config, files.path)
        else:
            predictor = predictor_in(found, config)
        paths = [found] if found.is_file() else weight_files(found)
        return _weights(predictor, _read(predictor, paths, target.dtype), target.dtype)
    except (NoPredictorError, FormatError, ValueError, IndexError, KeyError, OSError, SafetensorError) as error:
        raise ModelError(f"engine {MTP.engine}: {found}: {error}; {MTP.advice(files.name)}") from None


def _read(predictor: Predictor, files: list[Path], dtype: torch.dtype) -> dict[str, Weight]:
    """Read tensors by their names in the model of one layer. Raises FormatError for parts that are damaged."""
    assembly, weights = Assembly(predictor.layout, dtype), dict[str, Weight]()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for stored in sorted(predictor.names.keys() & set(file.keys())):
                if whole := assembly.take(predictor.names[stored], file.get_tensor(stored)):
                    weights[whole[0]] = whole[1]
    return weights


def _weights(predictor: Predictor, tensors: dict[str, Weight], dtype: torch.dtype) -> PredictorWeights:
    own = {role.removeprefix(OWN): plain(tensors.pop(role)).float() for role in list(tensors) if role.startswith(OWN)}
    sizes, layer = layer_alone(tensors, predictor.dense, dtype)
    more = 1.0 if sizes.norm_form == NormForm.ONE_MORE else 0.0
    join = own["join.weight"]
    if predictor.is_hidden_first:
        join = join.roll(sizes.hidden, dims=1)
    return PredictorWeights(
        sizes,
        layer,
        predictor.dense.rotary,
        own["token_norm.weight"] + more,
        own["hidden_norm.weight"] + more,
        join.contiguous(),
        own["final_norm.weight"] + more,
        predictor.feeds_normed,
    )
