"""Tiny random models of every kind that runs here, and the table that says how near they are to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from swiftbatch.worker.exactness.row_agreement import Agreement, compare
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.dense_config import KINDS as DENSE_KINDS
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.files import ModelFiles
from swiftbatch.worker.model.kinds import SUPPORTED_KINDS
from swiftbatch.worker.model.text_view import NESTING, SAME_AS, text_view
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.transformers_forwards import TransformersForwards

VOCAB_SIZE = 97
NUM_POSITIONS = 1024
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ALL_WINDOWED = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 96},
    "helium": {"head_dim": 16},  # its heads are as wide together as a row
    "olmoe": {"hidden_size": 128},  # its norms span the heads together
    "qwen2": ALL_WINDOWED,
    "qwen3": ALL_WINDOWED,
}


def tiny_config(kind: str, window: int = 100, has_wide_heads: bool = False) -> PreTrainedConfig:
    """Four small layers; windows and chunks of so few positions that texts of 300 tokens pass them.

    Wide heads are such as the kernels take.
    """
    sizes = {**SIZES, "sliding_window": window, "attention_chunk_size": window, **OWN_SIZES.get(kind, {})}
    if has_wide_heads:
        sizes |= {"qk_nope_head_dim": 48} if "qk_nope_head_dim" in sizes else {"head_dim": 64, "hidden_size": 256}
    return AutoConfig.for_model(kind, **sizes)


def tiny_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, norms and sinks included: at their initial ones and zeros a mistake in them would not show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tiny_target(
    kind: str, dtype: torch.dtype = torch.float32, window: int = 100, variant: str | None = None
) -> TargetModel:
    """With `variant` heads are wide, and plain layers attend in its kernels."""
    model = tiny_model(tiny_config(kind, window, variant is not None), dtype)
    files = ModelFiles(kind, Path(kind), Digests({}, {}), NUM_POSITIONS, VOCAB_SIZE)
    return TargetModel(TransformersForwards(model, files, variant), files)


def asks_for(target: TargetModel) -> str:
    """What a kind's attention needs beside keys and values, in words."""
    words = sorted(
        {"full": "", "window": "sliding window", "chunk": "chunks"}[span.kind] for span in target.transformers.spans
    )
    config = target.model.config
    if getattr(config, "attn_logit_softcapping", None):
        words.append("soft cap")
    if config.model_type == "gpt_oss":
        words.append("sinks")
    if hasattr(config, "qk_nope_head_dim"):
        words.append("latent keys and values")
    if any("Experts" in type(module).__name__ for module in target.model.modules()):
        words.append("experts")
    return ", ".join(dict.fromkeys(filter(None, words))) or "-"


def where_it_runs(kind: str) -> tuple[str, str]:
    """The code that computes a kind as it is published, on a CPU and on a GPU."""
    if kind in DENSE_KINDS:
        return "kernels", "kernels"
    config = text_view(tiny_config(kind, has_wide_heads=True).to_dict())
    return path_on("cpu", config).name, path_on("cuda", config).name


def table() -> str:
    """The page of kinds: `docs/models.md`."""
    rows = []
    for kind in SUPPORTED_KINDS:
        target = tiny_target(kind)
        rows.append(_row(kind, asks_for(target), compare(target)))
    nested = ", ".join(f"`{kind}`" for kind in NESTING)
    same = ", ".join(f"`{kind}` as `{other}`" for kind, other in SAME_AS.items())
    return HEAD.replace("NESTED", nested).replace("SAME", same) + "\n".join(rows) + "\n"


def _row(kind: str, asked: str, found: Agreement) -> str:
    differ = f"{found.greatest_difference:.1e} | {found.num_same_choices} of {found.num_rows}"
    return f"| `{kind}` | {' | '.join(where_it_runs(kind))} | {asked} | {differ} |"


HEAD = """\
# Models that run here

A model runs if the `model_type` of its `config.json` (its kind) is in the table below. Any other kind is refused before
a job is accepted. Each kind was compared with transformers' own forward on a tiny model with random weights, in
float32, on 300 consecutive random tokens. Windows and chunks have 100 positions, so the rows lie on both sides of their
edges. `swiftbatch doctor --model MODEL` makes the same comparison with your model's own weights.

`swiftbatch inspect MODEL` shows all this for one model, before its weights are downloaded. What computes it, in the
columns: `kernels` are our own for all of a forward; with `kernels attend` the layers of transformers multiply;
`transformers` are its layers alone, which on a GPU take thousands of launches a token: slow. Windows that are in use
make `transformers` of `kernels`, also in the kinds that have kernels here.

Models of text and images run as texts, and lines with images are rejected:
NESTED.
Some kinds are another one by name:
SAME.

The other columns: what the kind needs beside plain attention to all positions; the greatest difference between two
logits (which spread over about 10); the rows with the same best token.
`python -m tests.worker.model.kind_parts > docs/models.md` writes this page. The figures come from one machine with
AVX-512, with attention in torch. On a CPU, layers that need nothing beside experts or latent keys and values use the
attention of the [kernels](kernels.md), which is tested with every kind.

Refused in every kind: rotary positions of the types `dynamic` and `longrope`, because a row's result would depend on
other texts in the batch. Not supported: state-space and linear-attention layers, position biases, learned positions,
quantized weights, adapters (merge them first). Weights that lack a tensor of the model, or
have one that the model has no place for, are refused, because `transformers` would fill gaps with random numbers.

| kind | on a CPU | on a GPU | needs | greatest difference | same choices |
|---|---|---|---|---|---|
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(), end="")
