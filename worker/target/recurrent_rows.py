"""Row-exact recurrent layers of `transformers` models: each row starts at its parent's state.

The recurrence goes position by position, in the order of a row's own path, and takes the same calls of the same shapes
for every row. So a row has the same bits in a tree, in a prompt and alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from swiftbatch.worker.caches.recurrent_cache import RecurrentCache
from swiftbatch.worker.kernels.compute_threads import Team, shared_team
from swiftbatch.worker.kernels.instruction_sets import load_library
from swiftbatch.worker.kernels.recurrence import are_known_states
from swiftbatch.worker.model.attention_needs import attention_of, form_of, recurrent_layers
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape
from swiftbatch.worker.target.recurrent_mixers import DeltaAttention, DeltaNet, MambaLayer, ShortConvolution
from swiftbatch.worker.target.recurrent_paths import Mixer, Projected, StateWalk
from swiftbatch.worker.target.tiles import SequenceRows
from swiftbatch.worker.target.transformers_attention import ExactRows

MIXERS: dict[str, Callable[[Any], Mixer]] = {
    "delta attention (KDA)": DeltaAttention,
    "gated delta nets": DeltaNet,
    "Mamba-2": MambaLayer,
    "short convolutions": ShortConvolution,
}


def take_over_recurrent_layers(model: Any, variant: str | None = None) -> RecurrentShape | None:
    """Let the recurrent layers of a model run rows of caches; None where it has none.

    States that the kernels know run in those of an instruction set.
    """
    _number_caches(model)
    nets = list(recurrent_layers(model).values())
    if not nets:
        return None
    mixers = [MIXERS[form_of(net)](net) for net in nets]
    shape = mixers[0].shape(len(nets))
    team = shared_team(load_library(variant), torch.get_num_threads()) if variant and runs_in_kernels(shape) else None
    for number, (net, mixer) in enumerate(zip(nets, mixers, strict=True)):
        net.forward = functools.partial(_forward, mixer, team, number, net.forward)
    return shape


def _number_caches(model: Any) -> None:
    """Let layers that attend use the caches of layers that do, in order: others may have a state, or products alone."""
    layers = getattr(decoder_of(model), "layers", ())
    attending = [part for layer in layers if (part := attention_of(layer)) is not None]
    for number, attention in enumerate(attending):
        attention.layer_idx = number


def runs_in_kernels(shape: RecurrentShape) -> bool:
    """Tell whether the kernels take a model's states."""
    return are_known_states(shape.num_heads, shape.value_dim)


def _forward(
    mixer: Mixer,
    team: Team | None,
    number: int,
    otherwise: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    row_groups: list[ExactRows] | None = None,
    **others: Any,
) -> Tensor:
    """A layer's forward over the rows of several sequences, `[1, num_rows, hidden]`; padding rows give zeros.

    Without groups of rows it is `otherwise`, that of `transformers`.
    """
    if row_groups is None:
        return otherwise(hidden_states, **others)
    projected = mixer.project(hidden_states[0])
    mixed, start = [], 0
    for group in row_groups:
        rows = slice(start, start + len(group))
        mixed.append(_run_group(mixer, team, number, group.rows, projected.part(rows)))
        start = rows.stop
    whole = torch.cat(mixed)
    padding = hidden_states.shape[1] - len(whole)
    whole = pad(whole, (0, 0) * (whole.ndim - 1) + (0, padding))
    return mixer.output(whole, projected.gates)[None]


def _run_group(mixer: Mixer, team: Team | None, number: int, rows: SequenceRows, projected: Projected) -> Tensor:
    """The rows of one sequence through its state."""
    cache = rows.cache
    assert isinstance(cache, RecurrentCache)
    first = rows.first_entry - cache.boundary
    cache.reserve(first + len(rows))
    layer, paths = cache.recurrent[number], paths_of(rows, cache.boundary)
    layer.write_inputs(first, projected.inputs)
    return mixer.mix(StateWalk(layer, paths, cache.length - cache.boundary, first, team), projected)


def paths_of(rows: SequenceRows, boundary: int) -> list[list[int]]:
    """The steps of each row's own path behind a cache's boundary, its own last."""
    before = list(range(rows.boundary - boundary))
    return [
        before + (rows.tail_entries[row, :length] - boundary).tolist() for row, length in enumerate(rows.tail_lengths)
    ]
