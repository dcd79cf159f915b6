"""The target model: any `transformers` causal language model, run row-exactly over tiles."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from worker.caches.full import CacheShape, FullKVCache
from worker.caches.offloaded import OffloadedKVCache
from worker.caches.room import KVRoom, place_of_caches
from worker.model.causal_lm import Head, decoder_of
from worker.model.files import ModelError, ModelFiles
from worker.model.layer_needs import observe_layers
from worker.model.weights import load_causal_lm
from worker.target.attention import ATTENTION_NAME, ExactRows, QueryTap, RowGroup
from worker.target.experts import EXPERTS_NAME
from worker.target.finite import check_model
from worker.target.partial_rows import PartialRows
from worker.target.tiles import SequenceRows, Tile, chain_rows, needs_whole_tiles, pack_tiles, tree_rows
from worker.tree import DraftTree

LONGEST_TEXT = 2**21  # positions; masks are not looked at beyond, where no job comes
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(device: str) -> torch.device:
    """Turn `auto`, `cpu` or `cuda` into a device; ModelError where CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ModelError(
            f"device cuda: no CUDA device is visible to torch {torch.__version__} ({build}); use --device cpu"
        )
    return torch.device("cuda" if device != "cpu" and available else "cpu")


@dataclass(frozen=True)
class RowOutputs:
    """What a forward says of one sequence's rows."""

    hidden: torch.Tensor  # [num_rows, hidden] final hidden states
    logits: torch.Tensor  # [num_rows, vocab] float32


class TargetModel:
    """Weights on one device, and the forwards over rows of any number of sequences."""

    def __init__(self, model: Any, files: ModelFiles, kv_offload: str | None = None) -> None:
        """With `kv_offload`, a folder, caches live outside the device."""
        config = model.config
        layers = observe_layers(model, files.name, min(files.max_positions, LONGEST_TEXT))
        model.set_attn_implementation(ATTENTION_NAME)
        config._experts_implementation = EXPERTS_NAME
        self.files = files
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        head_dim = max(layers[0].key_dim, layers[0].value_dim)  # the smaller ones are padded with zeros
        self.cache_shape = CacheShape(len(layers), layers[0].num_kv_heads, head_dim, self.dtype, self.device)
        self.spans = [needs.span for needs in layers]
        self._decoder, self._head = decoder_of(model), Head(model)
        self._kv_offload = kv_offload
        self.pads_rows = needs_whole_tiles(self.device.type, self.dtype)

    @classmethod
    def load(cls, files: ModelFiles, dtype: str, device: str, kv_offload: str | None = None) -> TargetModel:
        """Load a model from its folder.

        Raises ModelError for one that is not whole or needs what we can't give, and for no finite logits.
        """
        if not sys.stderr.isatty():
            disable_progress_bar()  # a log holds no bars
        model = load_causal_lm(files, DTYPES[dtype])
        target = cls(model.to(resolve_device(device)).eval().requires_grad_(False), files, kv_offload)
        check_model(target)
        return target

    @property
    def is_offloaded(self) -> bool:
        """Whether caches live outside the device."""
        return self._kv_offload is not None

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, as whoever takes the time must."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def new_cache(self, max_length: int) -> FullKVCache:
        """An empty cache for a sequence of at most `max_length` tokens. Raises KVRoomError where it has no room."""
        if place := place_of_caches(self.device.type, self._kv_offload):
            KVRoom(place, self.cache_shape.bytes_per_position()).refuse_too_long(max_length)
        if self._kv_offload is None:
            return FullKVCache(self.cache_shape, max_length)
        return OffloadedKVCache(self.cache_shape, max_length, self._kv_offload)

    @torch.inference_mode()
    def verify(self, groups: list[SequenceRows]) -> list[RowOutputs]:
        """Run the rows of several sequences, row-exactly; returns each one's outputs."""
        hidden, logits = [], []
        for tile in pack_tiles(groups, self.pads_rows):
            states = self._tile(tile)
            logits.append(self.logits(states)[: tile.num_rows])
            hidden.append(states[: tile.num_rows])
        sizes = [len(group) for group in groups]
        split = zip(torch.cat(hidden).split(sizes), torch.cat(logits).split(sizes), strict=True)
        return [RowOutputs(*outputs) for outputs in split]

    @torch.inference_mode()
    def append(self, cache: FullKVCache, token_ids: list[int]) -> torch.Tensor:
        """Append one tile of known tokens to a cache; returns hidden states of those taken, `[num_rows, hidden]`."""
        rows = chain_rows(cache, token_ids)
        [tile] = pack_tiles([rows], self.pads_rows)
        hidden = self._tile(tile)[: len(rows)]
        cache.advance(len(rows))
        return hidden

    @torch.inference_mode()
    def draft(self, groups: list[PartialRows]) -> list[RowOutputs]:
        """Run rows behind partial caches: good guesses of what `verify` would say, in no way exact."""
        token_ids = [token_id for group in groups for token_id in group.token_ids]
        positions = [position for group in groups for position in group.positions]
        hidden = self._hidden(token_ids, positions, list(groups))
        sizes = [len(group) for group in groups]
        split = zip(hidden.split(sizes), self.logits(hidden).split(sizes), strict=True)
        return [RowOutputs(*outputs) for outputs in split]

    @torch.inference_mode()
    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        """Queries of one token behind a cache: `[num_layers, num_kv_heads, group, head_dim]`.

        Its keys and values go to the slot behind the cache, where the same token's have the same bits.
        """
        rows = tree_rows(cache, token_id, DraftTree())
        [tile] = pack_tiles([rows], self.pads_rows)
        tap = QueryTap(ExactRows.prepare(rows, self.dtype, self.device, self.spans))
        self._hidden(tile.token_ids(), tile.positions(), [tap])
        return tap.queries()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The language model head: `[num_rows, hidden]` to `[num_rows, vocab] float32`."""
        return self._head(hidden)

    def _tile(self, tile: Tile) -> torch.Tensor:
        """Final hidden states of a tile's rows, padding included: `[num_padded_rows, hidden]`."""
        groups: list[RowGroup] = [ExactRows.prepare(part, self.dtype, self.device, self.spans) for part in tile.parts]
        return self._hidden(tile.token_ids(), tile.positions(), groups)

    def _hidden(self, token_ids: list[int], positions: list[int], groups: list[RowGroup]) -> torch.Tensor:
        """Final hidden states of all rows of one forward: `[num_rows, hidden]`."""
        output = self._decoder(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            row_groups=groups,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def _eos_token_ids(model: Any) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, else the model config's."""
    eos = model.generation_config.eos_token_id
    eos = model.config.eos_token_id if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])
