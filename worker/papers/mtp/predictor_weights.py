"""The weights of a layer that predicts further tokens, of a checkpoint or trained: one layer, and what is around it.

They are read beside the model's own and not hashed again: whatever they are, drafts change no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import MTP
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from swiftbatch.worker.kernels.forms import NormForm
from swiftbatch.worker.kernels.frequencies import Rotary
from swiftbatch.worker.kernels.packed import Weight, plain
from swiftbatch.worker.model.dense import layer_alone
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import read_config
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.predictors import OWN, NoPredictorError, Predictor, predictor_in, predictor_of
from swiftbatch.worker.model.tensors import Assembly
from swiftbatch.worker.target.target import TargetModel


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
    """Its tensors by their names in the model of one layer. Raises FormatError for parts that are damaged."""
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
