"""The kernels' work in plain torch, with the same roundings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, LayerWeights
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, Activation, AttentionView, NormForm
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.rope_cos_sin import angles, query_scales
from swiftbatch.worker.kernels.row_tables import Rows
from tests.worker.kernels.reference_experts import reference_experts
from tests.worker.kernels.reference_latent import latent_heads, latent_values

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: functools.partial(gelu, approximate="tanh"),
    Activation.RELU2: lambda rows: relu(rows).square(),
}


def xielu(rows: Tensor, curve: Tensor) -> Tensor:
    """Compute xIELU (Huang and Schlag 2024)."""
    squares, exponentials, share, bound = curve
    bent = (torch.expm1(rows.minimum(bound)) - rows) * exponentials
    return torch.where(rows > 0, squares * rows * rows, bent) + share * rows


class ReferenceDecoder:
    """A dense decoder; sums are float32 in torch's order."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.sizes = weights.sizes
        self._weights = weights

    def forward(
        self,
        groups: Sequence[Rows],
        with_logits: bool = True,
        layers: range | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        layers = range(self.sizes.num_layers) if layers is None else layers
        device = self._weights.embedding.device
        rows = torch.tensor([token_id for group in groups for token_id in group.token_ids], device=device)
        if state is None:
            state = torch.empty(len(rows), self.sizes.hidden, device=device)
        if layers.start == 0:
            state.copy_(self._rounded(self._weights.embedding[rows].float() * self.sizes.embedding_scale))
        for layer in layers:
            self._layer(layer, groups, state)
        if layers.stop < self.sizes.num_layers:
            return None, None
        hidden = self._norm(state, self._weights.final_norm).to(self.sizes.dtype)
        return hidden, self.logits(hidden) if with_logits else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[num_rows, hidden]` to `[num_rows, vocab] float32`."""
        logits, cap = _product(hidden.float(), self._weights.head) * self.sizes.logit_scale, self.sizes.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _layer(self, number: int, groups: Sequence[Rows], state: Tensor) -> None:
        weights = self._weights.layers[number]
        normed = self._norm(state, weights.input_norm)
        query, key, value = self._heads(normed, weights, groups)
        view = AttentionView(weights.window, self.sizes.score_softcap or None, weights.sinks)
        mixed = reference_attention(groups, number, query, key, value, self.sizes.scale, view)
        is_latent = self.sizes.latent is not None
        found = latent_values(mixed, weights, self.sizes, self._rounded) if is_latent else mixed.flatten(1).float()
        self._add(state, self._linear(found, weights.output), weights.output_norm)
        normed = normed if self.sizes.is_parallel else self._norm(state, weights.mlp_norm)
        self._add(state, self._fed_forward(normed, weights), weights.down_norm)

    def _fed_forward(self, normed: Tensor, weights: LayerWeights) -> Tensor:
        down = None if weights.down is None else self._linear(self._activated(normed, weights), weights.down)
        if weights.experts is None:
            assert down is not None
            return down
        return reference_experts(weights.experts, normed, ACTIVATIONS[self.sizes.activation], self._rounded, down)

    def _activated(self, normed: Tensor, weights: LayerWeights) -> Tensor:
        assert weights.up is not None
        up = self._linear(normed, weights.up)
        if weights.curve is not None:
            return self._rounded(xielu(up, weights.curve))
        activation = ACTIVATIONS[self.sizes.activation]
        if weights.gate is None:
            return self._rounded(activation(up))
        return self._rounded(self._rounded(activation(self._linear(normed, weights.gate))) * up)

    def _add(self, state: Tensor, part: Tensor, behind: Tensor | None) -> None:
        part = self._norm(part, behind)
        state.copy_(self._rounded(state + self._rounded(part * self.sizes.residual_scale)))

    def _heads(self, normed: Tensor, weights: LayerWeights, groups: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, keys and values, `[num_rows, heads, head_dim]` in the model's dtype."""
        positions = np.array([position for group in groups for position in group.positions])
        rotary = weights.rotary or self._weights.rotary
        table = angles(rotary, positions * (not weights.is_nope), self.sizes.dtype).to(normed.device)
        turns = [half.repeat(1, 2)[:, None] for half in table.chunk(2, dim=1)]
        if self.sizes.latent is not None:
            query, entry = latent_heads(
                normed, weights, self.sizes, self._rounded, lambda heads: _turned(heads, *turns)
            )
            return query, entry, entry
        query = self._turned(self._linear(normed, weights.query), weights.query_norm, turns)
        if growth := self._weights.rotary.growth:
            query = query * query_scales(growth, positions, self.sizes.dtype).to(query.device)[:, None, None]
        key = self._turned(self._linear(normed, weights.key), weights.key_norm, turns)
        value = self._linear(normed, weights.value).unflatten(1, (-1, self.sizes.head_dim))
        query, key, value = (each.to(self.sizes.dtype) for each in (query, key, value))
        return query, key, value

    def _turned(self, rows: Tensor, norm: Tensor | None, turns: list[Tensor]) -> Tensor:
        sizes = self.sizes
        rows = self._norm(rows, norm) if sizes.joins_heads else rows
        heads = rows.unflatten(1, (-1, sizes.head_dim))
        heads = heads if sizes.joins_heads or sizes.norms_after_rope else self._norm(heads, norm)
        heads = self._rounded(_turned(heads, *turns))
        return self._norm(heads, norm) if sizes.norms_after_rope else heads

    def _norm(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return rows
        if self.sizes.norm_form in (NormForm.CENTRED, NormForm.SHIFTED):
            rows = rows - rows.mean(-1, keepdim=True)
        scaled = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.sizes.epsilon)
        if self.sizes.norm_form == NormForm.TWICE:
            scaled = self._rounded(scaled)
        if self.sizes.norm_form == NormForm.SHIFTED:
            weight, shift = weight.float().chunk(2)
            return self._rounded(scaled * weight + shift)
        if self.sizes.qk_norms_differ and rows.ndim == 3:
            weight = weight.unflatten(0, rows.shape[1:])
        return self._rounded(scaled * (weight.float() + (self.sizes.norm_form == NormForm.ONE_MORE)))

    def _linear(self, rows: Tensor, linear: Linear) -> Tensor:
        return self._rounded(_product(rows, linear))

    def _rounded(self, rows: Tensor) -> Tensor:
        return rows.to(self.sizes.dtype).float()


def reference_attention(
    groups: Sequence[Rows],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    view: AttentionView = SEES_ALL,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute with numbers of `dtype` from scores to sums."""
    output = torch.empty_like(query)
    ends = list(itertools.accumulate(len(group) for group in groups))
    for group, end in zip(groups, ends, strict=True):
        new_keys, new_values = (each[end - len(group) : end].transpose(0, 1) for each in (key, value))
        group.cache.write(layer, group.first_entry, new_keys, new_values)
    for group, end in zip(groups, ends, strict=True):
        for row, number in enumerate(range(end - len(group), end)):
            tail = torch.from_numpy(group.tail_entries[row, : group.tail_lengths[row]]).to(query.device)
            slots = torch.cat((torch.arange(group.boundary, device=query.device), tail))
            keys, values = (each[:, slots].to(dtype) for each in group.cache.layer(layer))
            heads = query[number].to(dtype).unflatten(0, (len(keys), -1))  # [num_kv_heads, heads of each, head_dim]
            scores = heads @ keys.transpose(1, 2) * scale
            if view.softcap is not None:
                scores = view.softcap * torch.tanh(scores / view.softcap)
            if group.biases is not None:
                scores[..., : group.boundary] += torch.from_numpy(group.biases).to(query.device)
            if view.window is not None and not group.is_partial:
                scores[..., : max(0, len(slots) - view.window)] = float("-inf")
            output[number] = (_weights(scores, view) @ values).flatten(0, 1).to(output.dtype)
    return output


def _weights(scores: Tensor, view: AttentionView) -> Tensor:
    """Return `[num_kv_heads, heads of each, num_keys]`, with sinks."""
    if view.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = view.sinks.to(scores.dtype).view(*scores.shape[:2], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


def _product(rows: Tensor, linear: Linear) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return torch.nn.functional.linear(rows, linear.weight.float(), bias)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
