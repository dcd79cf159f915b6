"""Batch-invariant linear attention, SSM (Mamba-2) and convolution layers of `transformers` models."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.forward.transformers_attention import BatchInvariantRows, in_whole_tiles
from swiftbatch.worker.kernels.native_library import Team, load_library, shared_team
from swiftbatch.worker.kernels.native_recurrence import Steps, are_known_states, native_steps
from swiftbatch.worker.kv.recurrent_cache import RecurrentLayer, RecurrentStates
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape
from swiftbatch.worker.model.attention_needs import attention_of, form_of, recurrent_layers
from swiftbatch.worker.model.causal_lm import decoder_of


@dataclass(frozen=True)
class Projected:
    """Values that a recurrent layer computes per row before its state."""

    inputs: Tensor  # [num_rows, num_channels] of the convolution
    gates: Tensor  # [num_rows, ...] of the output
    factors: tuple[Tensor, ...] = ()  # each [num_rows, num_heads] or [num_rows, num_heads, num_decays] float32

    def part(self, rows: slice) -> Projected:
        return Projected(self.inputs[rows], self.gates[rows], tuple(each[rows] for each in self.factors))


class RecurrentParts(ABC):
    """Parts of a `transformers` recurrent layer."""

    def __init__(self, net: Any) -> None:
        self._net = net

    @abstractmethod
    def shape(self, num_layers: int) -> RecurrentShape:
        """Return the sizes of a model with `num_layers` such layers."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Projected:
        """Compute everything that precedes the state, from `[num_rows, hidden]`."""

    @abstractmethod
    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        """Return what rows of one sequence read from states along their paths, `[num_rows, ...]`."""

    @abstractmethod
    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """Compute everything that follows the state, `[num_rows, hidden]`."""


class StateWalk:
    """Pass over a sequence's rows in order, with the states of their parents."""

    def __init__(
        self, layer: RecurrentLayer, paths: list[list[int]], root: int, first: int, team: Team | None = None
    ) -> None:
        """`root` is the first step after the committed steps, and `first` is the step of the first row."""
        self._layer, self._paths, self._root, self._first, self._team = layer, paths, root, first, team

    def take(self, steps: Steps) -> Tensor:
        """Store the rows' steps and return what their queries read: `[num_rows, num_heads, value_dim]` float32."""
        states, parents = self._beginnings()
        run = self._in_torch if self._team is None else functools.partial(native_steps, self._team)
        updates, found = run(steps, states, parents)
        self._layer.write([path[-1] for path in self._paths], steps.keys, updates, steps.decays)
        return found

    def _beginnings(self) -> tuple[list[Tensor], list[int]]:
        """Return start states, and what each row follows: a start state (`-1 - index`) or an earlier row."""
        states, parents = [self._layer.state], []
        for path in self._paths:
            open_steps = [step for step in path[:-1] if step >= self._root]
            if not open_steps:
                parents.append(-1)
            elif open_steps[-1] >= self._first:
                parents.append(open_steps[-1] - self._first)
            else:  # the parent was in an earlier forward
                states.append(self._layer.folded(self._layer.state, open_steps))
                parents.append(-len(states))
        return states, parents

    def _in_torch(self, steps: Steps, states: list[Tensor], parents: list[int]) -> tuple[Tensor, Tensor]:
        own: list[Tensor] = []
        updates, found = [], []
        for row, parent in enumerate(parents):
            before = own[parent] if parent >= 0 else states[-1 - parent]
            state = before * steps.decays[row][:, :, None]
            keys, update = self._layer.heads_of(steps.keys[row])[:, :, None], steps.values[row]
            if steps.betas is not None:  # delta rule: the update is a share of the difference between value and state
                update = (update - (state * keys).sum(dim=1)) * steps.betas[row][:, None]
            own.append(state + keys * update[:, None])
            updates.append(update)
            found.append((own[row] * self._layer.heads_of(steps.queries[row])[:, :, None]).sum(dim=1))
        return torch.stack(updates), torch.stack(found)

    def convolved(
        self, convolution: Any, dtype: torch.dtype, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return a convolution over the last inputs of each path: `[num_rows, num_channels]`."""
        weight = convolution.weight[:, 0].float()
        width = weight.shape[1]
        before = list(range(-(width - 1), 0))
        steps = torch.tensor([(before + path)[-width:] for path in self._paths], device=weight.device)

        def convolve(window: Tensor) -> Tensor:
            total = window[:, 0] * weight[:, 0]
            for place in range(1, width):
                total = total + window[:, place] * weight[:, place]
            if convolution.bias is not None:
                total = total + convolution.bias.float()
            rounded = total.to(dtype)
            return rounded if activation is None else activation(rounded)

        convolved: Tensor = in_whole_tiles(convolve, self._layer.convolved(steps).float())
        return convolved


# Recurrent layers of `transformers` models: delta nets, Mamba-2, short convolutions.


EPSILON = 1e-6  # added to the squared lengths by which queries and keys are divided
STEEP = 20.0  # above this, log(1 + e^x) rounds to x


class DeltaNet(RecurrentParts):
    """Gated delta nets (Qwen3-Next, Qwen3.5)."""

    def shape(self, num_layers: int) -> RecurrentShape:
        return _shape(self._net, num_layers, ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim"))

    def project(self, hidden: Tensor) -> Projected:
        """Return betas and decays as factors.

        With few rows, torch sums matrix products of fewer than 16 columns in another order.
        """
        net = self._net
        if hasattr(net, "in_proj_qkv"):
            inputs = net.in_proj_qkv(hidden)
            b, a = in_whole_tiles(lambda rows: (net.in_proj_b(rows), net.in_proj_a(rows)), hidden)
            gates = net.in_proj_z(hidden).unflatten(-1, (-1, net.head_v_dim))
        else:
            mixed = net.in_proj_qkvz(hidden)[None], net.in_proj_ba(hidden)[None]
            query, key, value, gates, b, a = (each[0] for each in net.fix_query_key_value_ordering(*mixed))
            inputs = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
        betas, decays = in_whole_tiles(self._betas_and_decays, b, a)
        return Projected(inputs, gates.contiguous(), (betas, decays))

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net = self._net
        return _by_delta_rule(
            walk, projected, net.conv1d, (net.key_dim, net.value_dim), (net.head_k_dim, net.head_v_dim)
        )

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        normed = self._net.norm(mixed.flatten(0, 1), gates.flatten(0, 1))
        output: Tensor = self._net.out_proj(normed.view(len(mixed), -1))
        return output

    def _betas_and_decays(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        rate = -self._net.A_log.float().exp() * softplus(a.float() + self._net.dt_bias)
        return b.sigmoid().float(), rate.exp()[..., None]


class DeltaAttention(RecurrentParts):
    """Kimi's delta attention (KDA), with a decay per row of a state."""

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        heads, dims = (net.num_heads, net.num_heads), (net.head_dim, net.head_dim)
        return RecurrentShape(num_layers, *heads, *dims, net.conv_dim, net.conv_kernel_size, num_decays=net.head_dim)

    def project(self, hidden: Tensor) -> Projected:
        """Return betas and decays as factors."""
        net, forget = self._net, self._net.forget_gate
        inputs = torch.cat([net.q_proj(hidden), net.k_proj(hidden), net.v_proj(hidden)], dim=-1)
        b = in_whole_tiles(net.b_proj, hidden)
        gates = net.g_b_proj(net.g_a_proj(hidden)).unflatten(-1, (-1, net.head_dim))
        factors = in_whole_tiles(self._betas_and_decays, b, forget.f_b_proj(forget.f_a_proj(hidden)))
        return Projected(inputs, gates.contiguous(), factors)

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net = self._net
        return _by_delta_rule(walk, projected, net.conv1d, (net.qkv_dim, net.qkv_dim), (net.head_dim, net.head_dim))

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        normed = self._net.o_norm(mixed.flatten(0, 1), gates.flatten(0, 1))
        output: Tensor = self._net.o_proj(normed.view(len(mixed), -1))
        return output

    def _betas_and_decays(self, b: Tensor, forgotten: Tensor) -> tuple[Tensor, Tensor]:
        forget = self._net.forget_gate
        heads = (forgotten.float() + forget.dt_bias.float()).unflatten(-1, (-1, forget.head_dim))
        steps = torch.where(heads > STEEP, heads, torch.log(1.0 + heads.exp()))
        return b.sigmoid().float(), (-forget.A_log.float().exp()[0] * steps).exp()


def _by_delta_rule(
    walk: StateWalk, projected: Projected, convolution: Any, widths: tuple[int, int], dims: tuple[int, int]
) -> Tensor:
    """Return what the rows of a delta net read; `widths` are of all keys and values."""
    dtype, (betas, decays), (key_dim, value_dim) = projected.inputs.dtype, projected.factors, dims
    convolved = walk.convolved(convolution, dtype, silu)
    queries, keys, values = convolved.split([widths[0], *widths], dim=-1)
    normed_queries, normed_keys = (
        in_whole_tiles(_of_length_one, each.unflatten(-1, (-1, key_dim))) for each in (queries, keys)
    )
    heads = values.float().unflatten(-1, (-1, value_dim))
    return walk.take(Steps(normed_queries / key_dim**0.5, normed_keys, heads, decays, betas)).to(dtype)


def _of_length_one(heads: Tensor) -> Tensor:
    heads = heads.float()
    return heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + EPSILON)


class MambaLayer(RecurrentParts):
    """Mamba-2 (Bamba, Falcon-H1, Granite 4 h, Nemotron-H), with keys B and queries C."""

    def shape(self, num_layers: int) -> RecurrentShape:
        return _shape(self._net, num_layers, ("num_heads", "n_groups", "ssm_state_size", "head_dim"))

    def project(self, hidden: Tensor) -> Projected:
        """Return time steps and decays as factors."""
        net = self._net
        if hasattr(net, "mup_vector"):  # Falcon-H1 scales all parts
            projected = net.in_proj(hidden * net.ssm_in_multiplier) * net.mup_vector[0]
        else:
            projected = net.in_proj(hidden)
        gates, inputs, steps = projected.split([net.intermediate_size, net.conv_dim, net.num_heads], dim=-1)
        return Projected(inputs, gates.contiguous(), in_whole_tiles(self._steps_and_decays, steps))

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net, (steps, decays) = self._net, projected.factors
        convolved = walk.convolved(net.conv1d, projected.inputs.dtype, net.act).float()
        width = net.n_groups * net.ssm_state_size
        values, keys, queries = convolved.split([net.intermediate_size, width, width], dim=-1)
        heads = values.unflatten(-1, (-1, net.head_dim))
        queries, keys = (each.unflatten(-1, (-1, net.ssm_state_size)) for each in (queries, keys))
        found = walk.take(Steps(queries, keys, heads * steps[..., None], decays))
        mixed: Tensor = found + net.D.float()[:, None] * heads
        return mixed.flatten(1)

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        net = self._net
        gated = net.norm(mixed, gates) if getattr(net, "mamba_rms_norm", True) else mixed * silu(gates)
        output: Tensor = net.out_proj(gated.to(gates.dtype))
        return output

    def _steps_and_decays(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        net = self._net
        steps = softplus(steps + net.dt_bias.to(steps.dtype)).clamp(*net.time_step_limit).float()
        return steps, (-net.A_log.float().exp() * steps).exp()[..., None]


class ShortConvolution(RecurrentParts):
    """Short convolutions between gates (LFM2), whose state is their last inputs."""

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        return RecurrentShape(num_layers, 0, 0, 0, 0, net.conv.in_channels, net.conv_kernel_size)

    def project(self, hidden: Tensor) -> Projected:
        before, behind, values = self._net.in_proj(hidden).chunk(3, dim=-1)
        return Projected(before * values, behind)

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        return walk.convolved(self._net.conv, projected.inputs.dtype)

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        output: Tensor = self._net.out_proj((gates * mixed).contiguous())
        return output


def _shape(net: Any, num_layers: int, names: tuple[str, str, str, str]) -> RecurrentShape:
    return RecurrentShape(num_layers, *(getattr(net, name) for name in (*names, "conv_dim", "conv_kernel_size")))


# Row-exact recurrent layers of `transformers` models: each row starts at its parent's state.


RECURRENT_LAYERS: dict[str, Callable[[Any], RecurrentParts]] = {
    "delta attention (KDA)": DeltaAttention,
    "gated delta nets": DeltaNet,
    "Mamba-2": MambaLayer,
    "short convolutions": ShortConvolution,
}


def take_over_recurrent_layers(model: Any, variant: str | None = None) -> RecurrentShape | None:
    """Make a model's recurrent layers run rows of several caches.

    Returns their sizes, or None if the model has none.
    """
    _number_caches(model)
    nets = list(recurrent_layers(model).values())
    if not nets:
        return None
    mixers = [RECURRENT_LAYERS[form_of(net)](net) for net in nets]
    shape = mixers[0].shape(len(nets))
    team = shared_team(load_library(variant), torch.get_num_threads()) if variant and runs_in_kernels(shape) else None
    for number, (net, mixer) in enumerate(zip(nets, mixers, strict=True)):
        net.forward = functools.partial(_forward, mixer, team, number, net.forward)
    return shape


def _number_caches(model: Any) -> None:
    """Number caches so that only attention layers count."""
    layers = getattr(decoder_of(model), "layers", ())
    attending = [part for layer in layers if (part := attention_of(layer)) is not None]
    for number, attention in enumerate(attending):
        attention.layer_idx = number


def runs_in_kernels(shape: RecurrentShape) -> bool:
    return are_known_states(shape.num_heads, shape.value_dim)


def _forward(
    mixer: RecurrentParts,
    team: Team | None,
    number: int,
    otherwise: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    row_groups: list[BatchInvariantRows] | None = None,
    **others: Any,
) -> Tensor:
    """Run a layer over rows of several sequences, `[1, num_rows, hidden]`, or `otherwise` without groups."""
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


def _run_group(
    mixer: RecurrentParts, team: Team | None, number: int, rows: SequenceRows, projected: Projected
) -> Tensor:
    cache = rows.cache
    states = cache.layer_states
    assert isinstance(states, RecurrentStates)
    first = rows.first_entry - states.boundary
    states.reserve(first + len(rows))
    layer, paths = states.layers[number], paths_of(rows, states.boundary)
    layer.write_inputs(first, projected.inputs)
    return mixer.mix(StateWalk(layer, paths, cache.length - states.boundary, first, team), projected)


def paths_of(rows: SequenceRows, boundary: int) -> list[list[int]]:
    """Return the steps of each row's path after a cache's boundary, its own last."""
    before = list(range(rows.boundary - boundary))
    return [
        before + (rows.tail_entries[row, :length] - boundary).tolist() for row, length in enumerate(rows.tail_lengths)
    ]
