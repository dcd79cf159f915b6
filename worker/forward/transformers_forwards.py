"""Row-exact forwards of any causal language model of `transformers`, in tiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.forward_interface import SparseRows
from swiftbatch.worker.forward.hardware import hardware_of, torch_gemms
from swiftbatch.worker.forward.tile_packing import (
    SequenceRows,
    Tile,
    chain_rows,
    needs_whole_tiles,
    pack_tiles,
    tree_rows,
)
from swiftbatch.worker.forward.transformers_attention import (
    ATTENTION_NAME,
    Asked,
    BatchInvariantRows,
    QueryTap,
    RowGroup,
    attends_of,
    attention_by_definition,
    attention_numerics,
)
from swiftbatch.worker.forward.transformers_recurrent import runs_in_kernels, take_over_recurrent_layers
from swiftbatch.worker.kernels.gpu_kernel_choice import with_kv
from swiftbatch.worker.kernels.kernel_sizes import FEWEST_COLUMNS, TILE_ROWS
from swiftbatch.worker.kernels.native_library import kernel_numerics
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import Entries, NewEntries, SparseCacheFactory
from swiftbatch.worker.model.attention_needs import observe_layers
from swiftbatch.worker.model.causal_lm import Head, decoder_of
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.batch_sampler import BatchSampler, create_batch_sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree

VECTORS = 64  # numbers in two vectors of bf16, the most that a loop step processes
ON_ONE_THREAD = 16384  # numbers up to which torch uses one thread in all of these functions

CURVED: frozenset[Callable[..., Any]] = frozenset(  # functions whose bits were found to depend on the batch
    [
        *(functional.silu, functional.gelu, functional.softplus, functional.mish, functional.elu, functional.selu),
        *(functional.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.exp2),
    ]
)


def has_rests(decoder: torch.nn.Module, least_rows: int) -> bool:
    """Return whether an elementwise loop over a layer's rows may end with scalar steps for the remainder."""
    weights = ((name, each) for name, each in decoder.named_parameters() if each.ndim >= 2 and "embed" not in name)
    widths = {width for name, each in weights for width in each.shape[-2:] if width >= FEWEST_COLUMNS}
    is_shared_out = torch.get_num_threads() > 1 and TILE_ROWS * max(widths, default=0) > ON_ONE_THREAD
    return is_shared_out or any(least_rows * width % VECTORS for width in widths)


class WholeVectors(TorchFunctionMode):
    """Makes torch compute exponential functions in whole vectors, on one thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CURVED or not args or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return in_whole_vectors(func, *args, **kwargs)


def in_whole_vectors(function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply an elementwise function in calls without a scalar remainder, each on one thread."""
    flat = numbers.reshape(-1)
    padded = pad(flat, (0, -len(flat) % VECTORS))
    parts = [function(part, *args, **kwargs) for part in padded.split(ON_ONE_THREAD)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[: len(flat)].view(numbers.shape)


# Row-exact mixture of experts: each expert runs whole tiles, so a row's bits do not depend on other rows.


EXPERTS_NAME = "swiftbatch_whole_tiles"


def run_experts(
    module: Any,
    hidden_states: torch.Tensor,  # [num_rows, hidden]
    top_k_index: torch.Tensor,  # [num_rows, top_k]
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run `transformers`' experts, `[num_rows, hidden]`; sum each row's experts in the order in which it chose them."""
    outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[1])
    for expert in top_k_index.unique().tolist():
        rows, choices = (top_k_index == expert).nonzero(as_tuple=True)
        states = pad(hidden_states[rows], (0, 0, 0, -len(rows) % TILE_ROWS))
        outputs[rows, choices] = _run_expert(module, expert, states)[: len(rows)]
    return (outputs * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _run_expert(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        states = module._apply_gate(_project(module, "gate_up_proj", expert, states))
    else:
        states = module.act_fn(_project(module, "up_proj", expert, states))
    states = _project(module, "down_proj", expert, states)
    return module.post_expert_norm(states) if module.has_post_expert_norm else states


def _project(module: Any, name: str, expert: int, states: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return linear(states, weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, run_experts)


LONGEST_TEXT = 2**21  # masks are checked up to this length, which no job reaches


class TransformersForwards:
    """`Forwards` with the model's own layers, except for attention."""

    arena = None
    team = None
    never_sampled_ids: torch.Tensor | None = None
    draw_chains = None
    can_scan = False
    expert_counts = None

    def __init__(
        self, model: Any, files: ModelFiles, variant: str | None = None, kv_dtype: KVDtype | None = None
    ) -> None:
        """Raise ModelError for unsupported attention."""
        layers = observe_layers(model, files.name, min(files.max_positions, LONGEST_TEXT))
        model.set_attn_implementation(ATTENTION_NAME)
        recurrent = take_over_recurrent_layers(model, variant)
        model.config._experts_implementation = EXPERTS_NAME
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.eos_token_ids = _eos_token_ids(model)
        head_dim = max(layers[0].key_dim, layers[0].value_dim)  # smaller heads are padded with zeros
        sizes = (len(layers), layers[0].num_kv_heads, head_dim)
        self.cache_shape = CacheShape(*sizes, self.dtype, self.device, recurrent, kv_dtype=kv_dtype)
        self.spans = [needs.span for needs in layers]
        self.has_experts = any("Experts" in type(module).__name__ for module in model.modules())
        self._attends, self._variant = attends_of(layers, self.dtype, variant), variant
        self._decoder, self._head = decoder_of(model), Head(model)
        self._pads_rows = needs_whole_tiles(self.device.type, self.dtype, _narrowest(self._decoder))
        self.narrow_rows: tuple[int, ...] = ()
        self.rows_per_forward = 1 if self.device.type == "cpu" else TILE_ROWS
        needs_vectors = self.device.type == "cpu" and has_rests(self._decoder, TILE_ROWS if self._pads_rows else 1)
        # only used if needed, since it slows every call
        self._vectors = WholeVectors() if needs_vectors else contextlib.nullcontext()

    def new_batch_sampler(self) -> BatchSampler:
        return create_batch_sampler(self.vocab_size, self.device)

    @property
    def numerics(self) -> str:
        """Return hardware, dtype, threads, torch's version and products, and attention kernels."""
        device, dtype = self.device.type, str(self.dtype).removeprefix("torch.")
        library = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
        library += f", products {torch_gemms()}" if device == "cpu" else ""
        attention = attention_numerics(self._attends, device, self.dtype, self._variant)
        computed = f"{device} {hardware_of(device)}, {dtype}, {library}, {attention}{self._states_numerics()}"
        return with_kv(computed, self.cache_shape.kv_dtype)

    def _states_numerics(self) -> str:
        """Return the name of what computes recurrent states. All our instruction sets give the same bits."""
        if (shape := self.cache_shape.recurrent) is None:
            return ""
        if self._variant is None or not runs_in_kernels(shape):
            return ", states in torch"
        return f", {kernel_numerics(self._variant, 'float32')} states"

    def run(
        self, groups: list[SequenceRows], feature_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = [], []
        for tile in pack_tiles(groups, self._pads_rows):
            states, features = self._tile(tile, feature_layers)
            logits.append(self.logits(states)[: tile.num_rows])
            hidden.append(features[: tile.num_rows])
        return torch.cat(hidden), torch.cat(logits)

    def read(self, cache: FullKVCache, token_ids: list[int], feature_layers: tuple[int, ...] = ()) -> torch.Tensor:
        rows = chain_rows(cache, token_ids)
        [tile] = pack_tiles([rows], self._pads_rows)
        _, features = self._tile(tile, feature_layers)
        cache.advance(len(rows))
        return features[: len(rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._vectors:
            return self._head(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return embeddings

    def states(self, token_ids: list[int], positions: list[int], groups: Sequence[RowGroup]) -> torch.Tensor:
        """Return final hidden states of a forward's rows, `[num_rows, hidden]`."""
        ids, places = (torch.tensor([each], device=self.device) for each in (token_ids, positions))
        with self._vectors:
            output = self._decoder(input_ids=ids, position_ids=places, use_cache=False, row_groups=list(groups))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids = [token_id for group in groups for token_id in group.token_ids]
        positions = [position for group in groups for position in group.positions]
        hidden = self.states(token_ids, positions, [SparseAttention(group) for group in groups])
        return hidden, self.logits(hidden)

    def room_for(self, new_cache: SparseCacheFactory, budget: int) -> NewEntries:
        return Entries

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        [tile] = pack_tiles([tree_rows(cache, token_id, DraftTree())], self._pads_rows)
        tap = QueryTap(self._prepared(tile.parts[0]))
        self.states(tile.token_ids(), tile.positions(), [tap])
        return tap.queries()

    def _tile(self, tile: Tile, feature_layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return final hidden states, and the features that the caller wants."""
        with outputs_of(self._decoder, feature_layers) as outputs:
            hidden = self.states(tile.token_ids(), tile.positions(), [self._prepared(part) for part in tile.parts])
        return hidden, torch.cat([outputs[each] for each in feature_layers], dim=1) if feature_layers else hidden

    def _prepared(self, rows: SequenceRows) -> BatchInvariantRows:
        return BatchInvariantRows.prepare(rows, self.dtype, self.device, self.spans, self._attends)


@contextlib.contextmanager
def outputs_of(decoder: Any, layers: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the outputs `[num_rows, hidden]` of some layers of one forward."""
    found: dict[int, torch.Tensor] = {}

    def keep(number: int, _module: Any, _inputs: Any, output: Any) -> None:
        found[number] = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)

    hooks = [decoder.layers[each].register_forward_hook(functools.partial(keep, each)) for each in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return the tokens that end a text, without defaults of the model's class."""
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


class SparseAttention:
    """`RowGroup` after a partial cache."""

    def __init__(self, rows: SparseRows) -> None:
        self._rows = rows
        sees_everything = len(rows) == 1 and rows.cache.bias is None
        self._mask = None if sees_everything else _mask(rows)
        self._group_mask: torch.Tensor | None = None  # repeats the mask for the query heads of a group

    def __len__(self) -> int:
        return len(self._rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Write keys and values, then attend to all visible entries."""
        keys, values = self._rows.cache.write(layer, self._rows.first_entry, key, value)
        num_rows, _, group, _ = query.shape
        if self._mask is not None and self._group_mask is None:
            self._group_mask = self._mask.repeat_interleave(group, dim=0)
        rows = query.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, num_rows * group, head_dim]
        output = _attend(rows, keys[None], values[None], self._group_mask, asked)
        attended: torch.Tensor = output[0].unflatten(1, (num_rows, group)).transpose(0, 1)
        return attended


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, asked: Asked
) -> torch.Tensor:
    """Attend rows `[1, num_kv_heads, num_rows * group, head_dim]` to all entries."""
    if asked.softcap is None and asked.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=asked.scaling)
    output, lse = attention_by_definition(query, keys, values, asked.scaling, mask, asked.softcap)
    if asked.sinks is None:
        return output
    group = asked.sinks.shape[1]
    share = torch.sigmoid(lse.unflatten(2, (-1, group)) - asked.sinks[:, None]).flatten(2)
    return output * share[..., None].to(output.dtype)


def _mask(rows: SparseRows) -> torch.Tensor:
    """Return an additive mask `[num_rows, num_entries + num_rows]`: biases of entries, and 0 for visible tails."""
    shape, first = rows.cache.shape, rows.first_entry
    mask = np.full((len(rows), first + len(rows)), -np.inf, dtype=np.float32)
    mask[:, :first] = 0.0 if rows.biases is None else rows.biases[:first]
    for row, length in enumerate(rows.tail_lengths):
        mask[row, rows.tail_entries[row, :length]] = 0.0
    return torch.from_numpy(mask).to(shape.device, shape.dtype)


def _narrowest(decoder: torch.nn.Module) -> int:
    """Return the fewest columns of any linear layer."""
    weights = (weight for name, weight in decoder.named_parameters() if weight.ndim == 2 and "norm" not in name)
    return min(weight.shape[0] for weight in weights)
