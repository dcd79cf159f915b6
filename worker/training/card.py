"""The model card that lies beside trained weights: recipe and figures, written by the training itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from worker.training.target.evaluate import NEAR, Evaluation
from worker.training.target.recipe import Recipe

CARD = "MODEL_CARD.md"

TEMPLATE = """# The embedded model

A small Llama-shaped decoder, trained from scratch on public-domain English books (published 1688-1922) with
`swiftbatch train target --data DIR`. It is there so that swiftbatch runs, tests and measures real long-form decoding
without a download. It writes period prose; it knows nothing and answers nothing.

| | |
|---|---|
| parameters | {num_parameters:,} ({hidden_size} wide, {num_layers} layers, tied embedding) |
| attention | {num_heads} heads of {head_dim} over {num_kv_heads} key-value heads, RoPE base {rope_theta:,.0f} |
| positions | {max_positions:,} |
| tokenizer | byte-level BPE, {vocab_size:,} entries |
| weights | safetensors, bf16 |
| data | {num_books} books, {num_characters:,} characters, {num_corpus_tokens:,} tokens |
| trained on | {num_trained_tokens:,} tokens in {num_steps:,} steps, {minutes:.0f} minutes |

## Recipe

bf16 autocast over float32 weights. Muon for the layers' matrices (rate {learning_rate}, decay {weight_decay}),
AdamW for embedding and norms (rate {embedding_learning_rate}); {num_warmup_steps} warm-up steps, linear fall over the
last {decay_share:.0%} of the steps to {final_rate:.0%}; gradients clipped at {gradient_clip}; seed {seed}.

| phase | window | windows per step | tokens | positions reached | last loss |
|---|---|---|---|---|---|
{phases}

Where more positions are reached than the window is long, random gaps in the position ids show the model distances that
it does not see whole (positional skip-wise training, Zhu et al. 2023).

## Figures on unseen books

{num_stretches} stretches of 100,000 tokens of concatenated whole test books, each scored in one forward:
{bits_per_byte:.3f} bits per byte. Beside it the same tokens, scored with the newest {near:,} to {twice_near:,} tokens
in front of them alone: where that is less, the text further back does harm.

| positions | nats per token | without the far text |
|---|---|---|
{losses}
"""


def write_card(
    folder: Path, recipe: Recipe, config: LlamaConfig, corpus: dict[str, int], evaluation: Evaluation
) -> None:
    """Write the card from the training log in `folder`; `corpus` has its counts and num_parameters."""
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {record["phase"]: record["loss"] for record in log}
    phases = [
        f"| {p.name} | {p.length:,} | {p.batch_size} | {p.num_steps * p.length * p.batch_size:,} "
        f"| {p.position_span:,} | {last[p.name]:.3f} |"
        for p in recipe.phases
    ]
    near = evaluation.near_loss_by_position
    losses = [f"| {span} | {loss:.3f} | {near[span]:.3f} |" for span, loss in evaluation.loss_by_position.items()]
    figures = vars(recipe) | corpus | vars(evaluation) | _shape(config)
    figures |= {
        "phases": "\n".join(phases),
        "losses": "\n".join(losses),
        "near": NEAR,
        "twice_near": 2 * NEAR - 1,
        "num_trained_tokens": log[-1]["num_tokens"],
        "num_steps": log[-1]["step"],
        "minutes": log[-1]["seconds"] / 60,
    }
    (folder / CARD).write_text(TEMPLATE.format(**figures), encoding="utf-8")


def _shape(config: LlamaConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
    }
