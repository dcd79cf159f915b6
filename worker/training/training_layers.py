"""Attention and gated delta nets for training, with a text's chunks in parallel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu, softplus
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from swiftbatch.worker.kernels.causal_attention import causal_attention, is_fast
from swiftbatch.worker.model.attention_needs import recurrent_layers

ATTENTION_NAME = "swiftbatch_training"
UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")  # `causal_attention` lacks these options


class EarlierSegments:
    """Keys and values, or states, of a text's earlier segments by layer, without gradients."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}  # each [1, num_kv_heads, length, head_dim]
        self._read: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}  # each has the latest inputs and the state

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self._read[layer] = key.detach(), value.detach()
        return causal_attention(query, key, value, scaling, self._behind.get(layer))

    def state_of(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a recurrent layer's latest convolution inputs and state, or None for both before the first segment."""
        return self._states.get(layer, (None, None))

    def keep_state(self, layer: int, inputs: Tensor, state: Tensor) -> None:
        self._states[layer] = inputs.detach(), state.detach()

    def advance(self) -> None:
        """Append the latest segment, whose length is a multiple of 64, to the earlier ones."""
        for layer, pair in self._read.items():
            behind = self._behind.get(layer)
            joined = pair if behind is None else [torch.cat(both, dim=2) for both in zip(behind, pair, strict=True)]
            self._behind[layer] = (joined[0], joined[1])


def attend_in_training(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    earlier: EarlierSegments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to whole sequences with the compiled kernels, otherwise (masks, caches, dropout) with torch as in `sdpa`.

    `query [batch, num_heads, length, head_dim]`; returns `[batch, length, num_heads, head_dim]`.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if earlier is not None:
        return earlier.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None  # type: ignore[arg-type]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_whole = attention_mask is None and causal and query.shape[2] == key.shape[2] and key.shape == value.shape
    is_plain = dropout == 0.0 and all(kwargs.get(name) is None for name in UNKNOWN)
    if is_whole and is_plain and is_fast(query):
        return causal_attention(query, key, value, scale).transpose(1, 2), None
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, attend_in_training)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


# Gated delta nets in training, with a text's chunks in parallel.


CHUNK = 64
MOST_KEPT = 8192  # most tokens per step for which delta nets store activations (20 KB per token and net)
EPSILON = 1e-6  # added to the squared lengths by which queries and keys are divided


def use_chunks(model: Any) -> None:
    """Make a model's gated delta nets compute in parallel chunks and continue `EarlierSegments`."""
    for net in recurrent_layers(model).values():
        net.forward = functools.partial(_forward, net)


@contextmanager
def sparing(model: Any, num_tokens: int) -> Iterator[None]:
    """Recompute layers for gradients, to save memory, in long steps of a model with delta nets."""
    if num_tokens <= MOST_KEPT or not recurrent_layers(model):
        yield
        return
    model.activation_checkpointing_enable()
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


def _forward(net: Any, hidden_states: Tensor, earlier: EarlierSegments | None = None, **others: Any) -> Tensor:
    """Run a delta net over whole texts `[batch, length, hidden]` without padding."""
    tail, state = (None, None) if earlier is None else earlier.state_of(net.layer_idx)
    inputs = net.in_proj_qkv(hidden_states)
    width = net.conv_kernel_size - 1
    padded = pad(inputs, (0, 0, width, 0)) if tail is None else torch.cat([tail, inputs], dim=1)
    convolved = silu(convolution(padded, net.conv1d.weight[:, 0])).float()
    queries, keys, values = convolved.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    queries, keys = (_of_length_one(each.unflatten(-1, (-1, net.head_k_dim))) for each in (queries, keys))
    decays = -net.A_log.float().exp() * softplus(net.in_proj_a(hidden_states).float() + net.dt_bias)
    betas = net.in_proj_b(hidden_states).float().sigmoid()
    heads = values.unflatten(-1, (-1, net.head_v_dim))
    with torch.autocast(inputs.device.type, enabled=False):
        found, behind = delta_rule(queries * net.head_k_dim**-0.5, keys, heads, decays, betas, state)
    if earlier is not None:
        earlier.keep_state(net.layer_idx, padded[:, -width:], behind)
    gates = net.in_proj_z(hidden_states).unflatten(-1, (-1, net.head_v_dim))
    normed = net.norm(found.to(inputs.dtype), gates)
    output: Tensor = net.out_proj(normed.flatten(2))
    return output


def convolution(inputs: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel of `[batch, width - 1 + length, channels]` with its `weight [channels, width]`."""
    length = inputs.shape[1] - weight.shape[1] + 1
    parts = (inputs[:, place : place + length] * weight[:, place] for place in range(weight.shape[1]))
    return functools.reduce(torch.add, parts)


def _of_length_one(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + EPSILON)


def delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what queries read, as `values [batch, length, num_heads, value_dim]`, and the last state; all float32.

    `queries` and `keys` are `[batch, length, num_key_heads, key_dim]`, logarithms of `decays` and `betas` `[batch,
    length, num_heads]`, the state `[batch, num_heads, key_dim, value_dim]`.
    """
    length, repeats = values.shape[1], values.shape[2] // keys.shape[2]
    queries, keys = (each.repeat_interleave(repeats, dim=2) for each in (queries, keys))
    queries, keys, values = (_in_chunks(each) for each in (queries, keys, values))
    decays, betas = (_in_chunks(each[..., None]) for each in (decays, betas))
    since = decays.cumsum(dim=3)  # logarithm of the remaining share of the chunk's first state
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=keys.device).triu(1)
    between = (since - since.mT).masked_fill(is_later, -torch.inf).exp()  # [batch, num_heads, chunks, to, from]
    left, heavy = since.exp(), keys * betas
    system, within = (heavy @ keys.mT) * between, (queries @ keys.mT) * between
    sides = torch.cat([values * betas, heavy * left], dim=-1)
    solved = _Inverse.apply(system) @ sides  # type: ignore[no-untyped-call]
    updates, losses = solved.split([values.shape[-1], keys.shape[-1]], dim=-1)
    kept = keys * (since[:, :, :, -1:] - since).exp()
    factors = torch.diag_embed(left[:, :, :, -1].expand(-1, -1, -1, keys.shape[-1])) - kept.mT @ losses
    added = kept.mT @ updates
    first = torch.zeros_like(added[:, :, 0]) if state is None else state
    states = _Walk.apply(factors, added, first)  # type: ignore[no-untyped-call]
    before = states[:, :, :-1]
    found = (queries * left) @ before + within @ (updates - losses @ before)
    return found.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1]


def _in_chunks(heads: Tensor) -> Tensor:
    """Reshape `[batch, length, num_heads, dim]` to `[batch, num_heads, num_chunks, CHUNK, dim]`, padded with zero
    steps.
    """
    padded = pad(heads, (0, 0, 0, 0, 0, -heads.shape[1] % CHUNK))
    chunks: Tensor = padded.transpose(1, 2).unflatten(2, (-1, CHUNK))
    return chunks.contiguous()


class _Inverse(torch.autograd.Function):
    """Inverse of a lower triangular matrix. Its diagonal is not read, and counts as 1."""

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        ones = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
        inverse: Tensor = torch.linalg.solve_triangular(system, ones, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


class _Walk(torch.autograd.Function):
    """All states `S[i + 1] = factors[i] S[i] + added[i]`, including the first."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, added: Tensor, first: Tensor) -> Tensor:
        by_chunk, sums = factors.flatten(0, 1), added.flatten(0, 1)
        states = [first.flatten(0, 1)]
        for chunk in range(factors.shape[2]):
            states.append(torch.baddbmm(sums[:, chunk], by_chunk[:, chunk], states[-1]))
        whole: Tensor = torch.stack(states, dim=1).unflatten(0, factors.shape[:2])
        ctx.save_for_backward(factors, whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors, states = ctx.saved_tensors
        by_chunk, given = factors.flatten(0, 1), gradient.flatten(0, 1)
        gradients = [given[:, -1]]
        for chunk in reversed(range(factors.shape[2])):
            gradients.append(torch.baddbmm(given[:, chunk], by_chunk[:, chunk].mT, gradients[-1]))
        whole = torch.stack(gradients[::-1], dim=1).unflatten(0, factors.shape[:2])
        behind = whole[:, :, 1:]
        return behind @ states[:, :, :-1].mT, behind, whole[:, :, 0]
