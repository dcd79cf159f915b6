"""EAGLE-3 heads, DFlash and DSpark drafters under their published names, and what they compute by definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import LlamaForCausalLM

from swiftbatch.worker.drafters.griffin.draft_forwards import Level
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

Tensors = dict[str, torch.Tensor]
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPSILON, THETA = 64, 96, 2, 1, 32, 289, 1e-6, 500_000.0
NUM_TARGET_LAYERS, NUM_DRAFT_TOKENS, NUM_LAYERS, BLOCK_SIZE, MASK, RANK = 8, 120, 2, 4, 288, 8
READ = {"eagle3": [1, 3, 4], "dflash": [0, 2, 5], "dspark": [1, 6]}  # the target's layers
IMPORTED_AS = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dflash"}
SIZES = {
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPSILON,
    "vocab_size": VOCAB,
}
BLOCKS = {"block_size": BLOCK_SIZE, "num_hidden_layers": NUM_LAYERS, "num_target_layers": NUM_TARGET_LAYERS}
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": NUM_DRAFT_TOKENS,
        "num_hidden_layers": 1,
        "rope_theta": THETA,
    },
    "dflash": {
        **SIZES,
        **BLOCKS,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ["dflash"]},
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "rope_scaling": None,
        "rope_theta": THETA,
    },
    "dspark": {
        **SIZES,
        **BLOCKS,
        "architectures": ["Qwen3DSparkModel"],
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": RANK,
        "mask_token_id": MASK,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "target_layer_ids": READ["dspark"],
    },
}


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    inner = 2 * HIDDEN if kind == "eagle3" else HIDDEN
    shapes: dict[str, tuple[int, ...]] = {"fc": (HIDDEN, len(READ[kind]) * HIDDEN), "norm": (HIDDEN,)}
    for layer in ["midlayer"] if kind == "eagle3" else [f"layers.{number}" for number in range(NUM_LAYERS)]:
        shapes |= {f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, inner)}
        shapes |= {f"{layer}.self_attn.{name}_proj": (KV_HEADS * HEAD_DIM, inner) for name in "kv"}
        shapes |= {f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{layer}.mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, WIDTH)}
        shapes |= {f"{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
        if kind != "eagle3":
            shapes |= {f"{layer}.self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
    if kind == "eagle3":
        return shapes | {"midlayer.hidden_norm": (HIDDEN,), "lm_head": (NUM_DRAFT_TOKENS, HIDDEN)}
    shapes["hidden_norm"] = (HIDDEN,)
    if kind == "dspark":
        shapes |= {f"markov_head.markov_w{number}": (VOCAB, RANK) for number in (1, 2)}
        shapes["confidence_head.proj"] = (1, HIDDEN + RANK)
    return shapes


def drafter_of(kind: str, reference: LlamaForCausalLM) -> Tensors:
    """Make numbers that bfloat16 holds."""
    torch.manual_seed(6)
    made = {f"{name}.weight": (0.15 * torch.randn(shape)).bfloat16() for name, shape in _shapes(kind).items()}
    made = {name: each + 1 if each.ndim == 1 else each for name, each in made.items()}
    if kind == "eagle3":
        ids = torch.randperm(VOCAB)[:NUM_DRAFT_TOKENS]  # in no order: nothing says that they are sorted
        made["d2t"] = ids - torch.arange(NUM_DRAFT_TOKENS)
        made["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    if kind == "dspark":
        made["confidence_head.proj.bias"] = torch.ones(1, dtype=torch.bfloat16)
        made["embed_tokens.weight"] = reference.get_input_embeddings().weight.detach().bfloat16()
        made["lm_head.weight"] = reference.lm_head.weight.detach().bfloat16()
    return made


def publish(folder: Path, kind: str, tensors: Tensors, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if kind == "eagle3":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | changes))
    return folder


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON) * weight


def turned(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate one head's rows `[num_rows, head_dim]`."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    left, right = rows.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def heads_of(rows: torch.Tensor, norm: torch.Tensor | None) -> list[torch.Tensor]:
    return [each if norm is None else normed(each, norm) for each in rows.split(HEAD_DIM, dim=-1)]


def attended(
    of: Callable[[str], torch.Tensor | None],
    asking: torch.Tensor,
    seen: torch.Tensor,
    positions: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    """Attend from the last rows, `asking`, to `seen`, whose positions are given."""
    weights = {name: of(f"self_attn.{name}_proj") for name in "qkvo"}
    [keys], [values] = (
        heads_of(linear(seen, weights["k"]), of("self_attn.k_norm")),
        heads_of(linear(seen, weights["v"]), None),
    )
    keys, found = turned(keys, positions), []
    for queries in heads_of(linear(asking, weights["q"]), of("self_attn.q_norm")):
        scores = turned(queries, positions[-len(asking) :]) @ keys.T / HEAD_DIM**0.5
        found.append((scores + mask).softmax(-1) @ values)
    return linear(torch.cat(found, dim=-1), weights["o"])


def mlp(of: Callable[[str], torch.Tensor | None], rows: torch.Tensor) -> torch.Tensor:
    inner = silu(linear(rows, of("mlp.gate_proj"))) * linear(rows, of("mlp.up_proj"))
    return linear(inner, of("mlp.down_proj"))


def _named(tensors: Tensors, prefix: str) -> Callable[[str], torch.Tensor | None]:
    return lambda name: None if (found := tensors.get(f"{prefix}{name}.weight")) is None else found.float()


def level_of(sequence: Sequence, tree: DraftTree) -> Level:
    """Return a chain's last node as a level."""
    return Level(sequence, tree, len(tree) - 1)


def features_by_definition(reference: LlamaForCausalLM, kind: str, token_ids: list[int]) -> torch.Tensor:
    """Return the outputs of the target's layers side by side, `[num_tokens, num_read * hidden]`."""
    with torch.no_grad():
        states = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[1 + layer][0] for layer in READ[kind]], dim=-1)


def embedded(reference: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    return reference.get_input_embeddings()(torch.tensor(token_ids)).detach()  # type: ignore[no-any-return]


def eagle3_by_definition(
    tensors: Tensors, reference: LlamaForCausalLM, text: list[int], seen: list[int], drafted: list[int]
) -> torch.Tensor:
    """Return logits `[vocab]` behind drafted tokens; the layer sees the positions `seen` of the text."""
    of, own = _named(tensors, "midlayer."), _named(tensors, "")
    wide = features_by_definition(reference, "eagle3", text)
    fused = torch.cat([torch.zeros(1, HIDDEN), linear(wide, own("fc"))])
    features, tokens = [fused[position] for position in seen], [text[position] for position in seen]
    for token_id in [*drafted, None]:
        given, embeddings = torch.stack(features), embedded(reference, tokens)
        pairs = torch.cat([normed(embeddings, of("input_layernorm")), normed(given, of("hidden_norm"))], dim=-1)
        later = torch.full((len(tokens),) * 2, -torch.inf).triu(1)
        rows = given + attended(of, pairs, pairs, torch.arange(len(tokens)), later)
        rows = rows + mlp(of, normed(rows, of("post_attention_layernorm")))
        if token_id is not None:
            features.append(rows[-1])
            tokens.append(token_id)
    logits = torch.full((VOCAB,), -torch.inf)
    logits[torch.arange(NUM_DRAFT_TOKENS) + tensors["d2t"]] = linear(normed(rows[-1], own("norm")), own("lm_head"))
    return logits


def block_by_definition(
    kind: str, tensors: Tensors, reference: LlamaForCausalLM, text: list[int], seen: list[int], drafted: list[int]
) -> torch.Tensor:
    """Return logits `[vocab]` behind drafted tokens, all from one block behind the positions `seen` of the text."""
    own = _named(tensors, "")
    wide = features_by_definition(reference, kind, text)[seen]
    context, rows = normed(linear(wide, own("fc")), own("hidden_norm")), embedded(reference, [text[-1]] + [MASK] * 3)
    positions = torch.cat([torch.tensor(seen), len(text) - 1 + torch.arange(BLOCK_SIZE)])
    for number in range(NUM_LAYERS):
        of = _named(tensors, f"layers.{number}.")
        inner = normed(rows, of("input_layernorm"))
        rows = rows + attended(of, inner, torch.cat([context, inner]), positions, 0.0)
        rows = rows + mlp(of, normed(rows, of("post_attention_layernorm")))
    row = len(drafted) + (kind == "dflash")  # a row of DFlash predicts its own token, a row of DSpark the next one
    logits = reference.lm_head(normed(rows[row], own("norm"))).detach()
    if kind == "dspark":
        last = [*text, *drafted][-1]
        logits = logits + linear(own("markov_head.markov_w1")[last], own("markov_head.markov_w2"))
    return logits  # type: ignore[no-any-return]
