"""A GRIFFIN draft model, and its definition in plain tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_forwards import GriffinRows, NativeRows, TiledRows
from swiftbatch.worker.drafters.griffin.draft_input import SPREAD, Candidates, DraftRows, regressed_place
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import random_tree

GREEDY = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
NUM_CANDIDATES = 10
Way = Callable[..., GriffinRows]


def by_kernels(model: GriffinModel, target: TargetModel, num_candidates: int = NUM_CANDIDATES) -> GriffinRows:
    if not isinstance(target.forwards, NativeForwards):
        pytest.skip("no kernels were compiled: no C compiler at install")
    return NativeRows(model, target.forwards, num_candidates)


def by_tiles(model: GriffinModel, target: TargetModel, num_candidates: int = NUM_CANDIDATES) -> GriffinRows:
    return TiledRows(model, target, num_candidates)


WAYS: dict[str, Way] = {"kernels": by_kernels, "tiles": by_tiles}


def load(folder: Path, dtype: str = "bfloat16") -> TargetModel:
    return TargetModel.load(locate_model(str(folder)), dtype, "cpu")


def by_token(candidates: Candidates) -> torch.Tensor:
    """Return log-confidences `[num_candidates]` by token."""
    return torch.tensor([score for score, _ in sorted(candidates, key=lambda pair: pair[1])])


def guess(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits / SPREAD, dim=-1)


def random_draft_model(target: TargetModel) -> GriffinModel:
    torch.manual_seed(1)
    model = GriffinModel(GriffinConfig.for_target(target.model.config))
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def noisy_draft_model(target: TargetModel, config: GriffinConfig) -> GriffinModel:
    """Make random norms and heads too: their initial ones and zeros would hide mistakes."""
    torch.manual_seed(2)
    model = GriffinModel(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter += (0.2 if parameter.ndim == 1 else 0.05) * torch.randn_like(parameter)
    return model.to(target.dtype).eval()


def random_rows(
    numbers: random.Random,
    rows: GriffinRows,
    length: int,
    target: TargetModel,
    params: SamplingParams = GREEDY,
    most_rows: int = 21,
) -> DraftRows:
    """Make a tree after `length` noise entries."""
    vocab = target.vocab_size
    sequence = Sequence("a", [numbers.randrange(vocab) for _ in range(12)], params, vocab)
    room, generator = rows.new_room(sequence), torch.Generator().manual_seed(length)
    known = room.cache.rows.buffer[..., :length, :]
    known.copy_(torch.randn(known.shape, generator=generator).to(known.dtype))
    room.cache.advance(length)
    tree = random_tree(numbers, most_rows - 1, length, vocab)
    placed = tree_rows(room.cache, numbers.randrange(vocab), tree)
    room.features.put(0, torch.randn(len(placed), target.hidden_size, generator=generator).to(target.dtype))
    paths = [[], *([token_id] * depth for token_id, depth in zip(tree.token_ids, tree.depths(), strict=True))]
    return DraftRows(room, placed, room.features.places(0, len(placed)), paths)


def regressed(part: DraftRows) -> torch.Tensor:
    return part.room.features.rows([regressed_place(part.first + row) for row in range(len(part))])


def read_sequence(
    target: TargetModel, token_ids: list[int], params: SamplingParams, name: str = "a"
) -> tuple[Sequence, FullKVCache]:
    """The cache holds all tokens except the last."""
    sequence = Sequence(name, token_ids, params, target.vocab_size)
    cache = target.new_cache(sequence.max_length)
    while cache.length < len(token_ids) - 1:
        target.read(cache, token_ids[cache.length : -1])
    return sequence, cache


def random_tokens(target: TargetModel, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, target.vocab_size, length).tolist()  # type: ignore[no-any-return]


def window_positions(length: int) -> list[int]:
    """Return sinks and window."""
    start = max(64, (length // 256 - 1) * 256)
    return [*range(min(64, length)), *range(start, length)]


def defined_outputs(
    model: GriffinModel, target: TargetModel, token_ids: list[int], drafted: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[vocab]` and feature `[hidden]` by definition, features regressed one by one."""
    ids = torch.tensor(token_ids)
    hidden = target.model.model(input_ids=ids[None], use_cache=False, row_groups=None).last_hidden_state[0]
    seen = window_positions(len(token_ids))
    zeros = torch.zeros_like(hidden[0])
    features = [hidden[position - 1] if position else zeros for position in seen]
    tokens = [token_ids[position] for position in seen]
    for token_id in [*drafted, None]:
        predicted, regressed = _rows(model, target, tokens, torch.stack(features))
        if token_id is not None:
            tokens.append(token_id)
            features.append(regressed[-1])
    return target.logits(predicted[-1:])[0], regressed[-1]


def _rows(
    model: GriffinModel, target: TargetModel, tokens: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings = target.model.get_input_embeddings()(torch.tensor(tokens))
    fused = model.fusion(features, embeddings)
    layer, count = model.layer, len(tokens)
    attention, normed = layer.self_attn, layer.input_layernorm(fused)
    head_dim = model.config.head_dim

    def heads(projection: torch.nn.Module) -> torch.Tensor:
        return projection(normed).view(count, -1, head_dim).transpose(0, 1)[None]  # [1, heads, rows, head_dim]

    cos, sin = model.rotary(fused[None], torch.arange(count)[None])
    query, key = apply_rotary_pos_emb(heads(attention.q_proj), heads(attention.k_proj), cos, sin)
    value, group = heads(attention.v_proj), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ value)[0].transpose(0, 1).flatten(1)
    hidden = fused + attention.o_proj(attended)
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.head(hidden)  # type: ignore[misc]
