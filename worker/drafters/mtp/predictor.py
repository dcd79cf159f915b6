"""The layer that predicts further tokens (MTP): in torch, on disk, its memory, and a sequence's rows."""

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
from swiftbatch.worker.drafters.catalogue import MTP
from swiftbatch.worker.drafters.griffin.draft_input import RING, Candidates, DraftRows, Room, regressed_place
from swiftbatch.worker.drafters.griffin.griffin_model import ranking_bytes
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import known_rows
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import NormForm
from swiftbatch.worker.kernels.quantized_weights import Weight, plain
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import (
    NO_DRAFTS,
    DraftMemory,
    GPUMemory,
    decoder_memory,
    slot_sampling_bytes,
)
from swiftbatch.worker.kv.kv_capacity import ITEM_SIZES
from swiftbatch.worker.kv.model_sizes import ModelSizes, sizes_of_stored
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.config_values import Config
from swiftbatch.worker.model.decoder_loading import layer_alone
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import CONFIG_KEYS, heads_in
from swiftbatch.worker.model.model_files import ModelFiles, read_config
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
from swiftbatch.worker.model.weight_files import Assembly


class PredictorModule(nn.Module):
    """Two norms, a linear layer, and a one-layer model of the target's kind."""

    def __init__(self, config: Config) -> None:
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
        """Compute the head's input, `[batch, num_rows, hidden]`, from inputs of that shape."""
        joined = self.join(torch.cat([self.token_norm(embeddings), self.hidden_norm(hidden)], dim=-1))
        output: torch.Tensor = self.decoder(inputs_embeds=joined, use_cache=False).last_hidden_state
        return output

    def begin_as(self, decoder: Any) -> None:
        """Begin as a copy of a model's norm and last layer, applied to the sum of both inputs, to train faster."""
        own = {name: each.shape for name, each in self.decoder.layers[0].state_dict().items()}
        for layer in reversed(decoder.layers):
            if {name: each.shape for name, each in layer.state_dict().items()} == own:
                self.decoder.layers[0].load_state_dict(layer.state_dict())
                break
        self.decoder.norm.load_state_dict(decoder.norm.state_dict())
        both = torch.eye(self.join.out_features, device=self.join.weight.device).repeat(1, 2)
        self.join.weight.data.copy_(both / 2)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights by their published names."""
        model = AutoModelForCausalLM.from_config(deepcopy(self._config), dtype=torch.float32)
        decoder_of(model).layers[0].load_state_dict(self.decoder.layers[0].state_dict())
        with TemporaryDirectory() as folder:
            model.save_pretrained(
                folder, max_shard_size="1TB"
            )  # its class knows how published files split what it joins
            written = load_file(Path(folder) / "model.safetensors")
        own = {"final_norm": self.decoder.norm, **{role: getattr(self, role) for role in ROLES[:-1]}}
        layer = {name: tensor for name, tensor in written.items() if name.startswith(ONE_LAYER)}
        return layer | {f"{OWN}{role}.weight": part.weight.detach() for role, part in own.items()}


@dataclass(frozen=True)
class PredictorWeights:
    """A layer with its sizes, and the float32 weights around it: norms `[hidden]`, `join [hidden, 2 * hidden]`."""

    sizes: DecoderSizes  # one layer's
    layer: LayerWeights
    rotary: Rotary
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: torch.Tensor  # the token embedding's columns come first
    final_norm: torch.Tensor
    feeds_normed: bool

    def cache_shape(self, device: torch.device) -> CacheShape:
        sizes, num_parts = self.sizes, 2 if self.sizes.latent is None else 1
        return CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device, num_parts=num_parts)

    def joined(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the layer's input, `[num_rows, hidden] float32`, from inputs of that shape."""
        parts = (self._norm(embeddings, self.token_norm), self._norm(hidden, self.hidden_norm))
        return torch.nn.functional.linear(torch.cat(parts, dim=-1), self.join)

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        """Return the head's input, `[num_rows, hidden]` of the model's dtype, from the layer's float32 output."""
        return self._norm(state, self.final_norm).to(self.sizes.dtype)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + self.sizes.epsilon) * weight


def load_predictor(parts_folder: Path | None, target: TargetModel) -> PredictorWeights:
    """Load the trained layer in a folder (None: the target's own), else the checkpoint's.

    Raises ModelError if there is no such layer, or if it belongs to another model.
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
    """Read tensors by their names in the one-layer model. Raises FormatError for damaged parts."""
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


# One sequence as an MTP layer knows it: the rows that it has run, and hidden states whose rows are to come.


NUM_SINKS = BLOCK  # first rows, never moved
WINDOW = 16 * BLOCK  # newest rows always seen; grows to twice as many before it is cut back
NUM_ENTRIES = NUM_SINKS + 2 * WINDOW
NUM_PLACES = RING + NUM_SINKS + WINDOW  # places of waiting hidden states and of a draft's features
MOST_AT_ONCE = 4 * BLOCK  # rows of a sequence in one call


@dataclass
class MTPSequence:
    room: Room
    position: int = 0  # position of the first hidden state that waits
    num_known: int = 0  # entries of the text; drafts stand behind them
    root: Candidates | None = None  # candidates behind the newest token; None if unknown

    @property
    def num_waiting(self) -> int:
        return self.room.features.end - self.position

    def take(self, position: int, hidden: torch.Tensor) -> None:
        """Queue hidden states `[num_rows, hidden]` for the positions from `position` on.

        A gap in the positions drops the states before the gap; if too many wait, the oldest are dropped.
        """
        self.root = None
        features = self.room.features
        if position != features.end:
            self.position = position
        features.put(position, hidden)
        self.position = max(self.position, features.first)

    def next_rows(self, most: int) -> list[DraftRows]:
        """Return the next waiting rows; call `know` after their forward."""
        room, first = self.room, self.position
        room.cache.roll_back(self.num_known)
        self._make_room()
        end = first + min(self.num_waiting, most)
        room.cache.first_angle = first - self.num_known
        groups = known_rows(room.cache, room.sequence.token_ids[first + 1 : end + 1].tolist())
        parts = []
        for rows in groups:
            places = room.features.places(first, first + len(rows))
            first += len(rows)
            parts.append(DraftRows(room, rows, places, [[]] if first == len(room.sequence) - 1 else []))
        return parts

    def know(self, num_rows: int) -> None:
        """Note that the next waiting rows have entries."""
        self.room.cache.advance(num_rows)
        self.num_known += num_rows
        self.position += num_rows

    def draft_anew(self) -> Candidates:
        """Begin a draft; return the candidates to follow the newest token, or no candidates if they are unknown."""
        if self.root is None:
            return []
        self.room.cache.roll_back(self.num_known)
        return self.root

    def draft_row(self, path: list[int]) -> DraftRows:
        [rows] = known_rows(self.room.cache, path[-1:])
        return DraftRows(self.room, rows, [regressed_place(len(path) - 1)], [path], len(path))

    def _make_room(self) -> None:
        """Keep only the first and the newest rows if the cache might otherwise overflow."""
        if self.num_known + MOST_AT_ONCE <= NUM_ENTRIES:
            return
        cache = self.room.cache
        for rows in cache.layer(0)[: cache.shape.num_parts]:
            rows[:, NUM_SINKS : NUM_SINKS + WINDOW] = rows[:, self.num_known - WINDOW : self.num_known].clone()
        self.num_known = NUM_SINKS + WINDOW
        cache.roll_back(self.num_known)


# The memory of a GPU that an MTP layer takes: its weights, activations and logits once, and a track for each slot.


DTYPES = {size: name for name, size in ITEM_SIZES.items()}


def predictor_memory(part: Path, files: ModelFiles, sizes: ModelSizes) -> DraftMemory:
    """Count the memory of the layer in a file or among a folder's weights."""
    config = read_config(files.name, files.path)
    try:
        if part.is_file():
            predictor = predictor_of(heads_in(part).items(), config, files.path)
        else:
            predictor = predictor_in(part, config)
    except (NoPredictorError, FormatError, OSError, SafetensorError):
        return NO_DRAFTS  # the loader reports the fault
    layer = sizes_of_stored(one_layer_config(config), predictor.layout.heads, DTYPES[sizes.item_size])
    if layer is None:
        return NO_DRAFTS
    decoder = decoder_memory(layer, GPUMemory(0), NUM_ENTRIES)
    numbers = NUM_ROWS * 2 * layer.hidden + _stacked_numbers(layer)  # joined rows
    part_bytes = decoder.part_bytes + numbers * layer.item_size + _join_bytes(predictor, layer)
    features = NUM_PLACES * layer.hidden * layer.item_size
    slot_bytes = decoder.slot_bytes + features + slot_sampling_bytes(sizes.vocab)
    return DraftMemory(part_bytes + ranking_bytes(sizes.vocab), slot_bytes)


def _stacked_numbers(layer: ModelSizes) -> int:
    """Count the elements of the matrices that exist twice while they are stacked."""
    heads = (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return max(heads, 2 * layer.intermediate) * layer.hidden


def _join_bytes(predictor: Predictor, layer: ModelSizes) -> int:
    """Count the bytes of the layer's own parts beyond their packed form."""
    own = [head.num_numbers for name, head in predictor.layout.heads.items() if name.startswith(OWN)]
    return sum(own) * layer.item_size if layer.packed else 0
