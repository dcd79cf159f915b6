"""Model card beside trained weights, from the trainings' logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER
from swiftbatch.worker.training.target_evaluation import NEAR

Records = list[dict[str, Any]]

HEADS = """## Decoding heads

`parts/tokenswift_heads.safetensors` serves the engine `tokenswift` alone and is no part of the model. Head i predicts
the token i + 1 places behind a row, from the row's final hidden state (TokenSwift, section 3.2). Made with
`swiftbatch train tokenswift`: {num_own_texts} texts of {num_own_tokens} tokens that the model sampled behind stretches
of {num_prompt_tokens} tokens of the training books (temperature 1, min-p 0.1, half of them with repetition penalty
1.2), its own distributions as labels. AdamW (decay {weight_decay}), rate {learning_rate}, {num_warmup_steps} warm-up
steps, cosine, {num_steps} steps of {num_step_rows:,} rows, seed {seed}; {minutes:.0f} minutes of steps.

Share of rows with the token among the first 1 / 2 / 3 candidates, in per cent, before and after training:

| text | rows | head | before | after |
|---|---|---|---|---|
{table}
"""

DRAFT = """## Draft model

`parts/draft/` is a model of its own and serves the engine `triforce` alone. It reads the first 16 tokens of a text and
the newest 256 to 511. Made with `swiftbatch train draft`: its labels are the model's own distributions (cross entropy)
along windows of {window_length} tokens, {own_share:.0%} of them from texts that the model sampled behind stretches of
the training books, the others from these books. Muon (rate {learning_rate}, decay {weight_decay}) and AdamW (rate
{embedding_learning_rate}), {num_warmup_steps} warm-up steps, linear fall over the last {decay_share:.0%} to
{final_rate:.0%}; {num_steps:,} steps of {num_step_windows} windows, seed {seed}; {minutes:.0f} minutes of steps.

Share of rows where it draws the same token as the model with the same noise, in per cent, before / after training:

| text | rows | {ways} |
|---|---|{dashes}|
{table}
"""

GRIFFIN = """## GRIFFIN's draft model

`parts/griffin.safetensors` serves the engine `griffin` alone and is no part of the model. It reads the first 64 tokens
of a text and the newest 256 to 511. Made with `swiftbatch train griffin`: features along the beginnings of the
training books and along {num_own_texts} own texts, {own_share:.0%} of the windows from these; the model's own
distributions as labels, beside the L1 distance of features. {num_steps:,} steps of {num_step_windows} windows of
{window_length} rows, up to {num_passes} passes, aligned to the top {align_top_k}; AdamW, {num_warmup_steps} warm-up
steps, linear fall to 0, gradients clipped at {clip_value} by value, seed {seed}; {minutes:.0f} minutes of steps.

Share of rows where it draws the same token as the model, in per cent, by forward of a draft (its own features of the
forwards before, the text's tokens); at temperature 1 with the same noise:

| text | rows | {ways} |
|---|---|{dashes}|
{table}
"""


def heads_section(records: Records) -> list[str]:
    """Return the section on TokenSwift's heads; empty if they were never measured."""

    def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        pairs = zip(before["top"], after["top"], strict=True)
        return [
            f"| {after['texts']} | {after['num_rows']:,} | {number} | {_shares(one)} | {_shares(two)} |"
            for number, (one, two) in enumerate(pairs, start=1)
        ]

    return _section(HEADS, records, lines)


def draft_section(records: Records) -> list[str]:

    def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        cells = [f"{_shares([before['same'][way]])} / {_shares([share])}" for way, share in after["same"].items()]
        return [f"| {after['texts']} | {after['num_rows']:,} | {' | '.join(cells)} |"]

    return _section(DRAFT, records, lines)


def griffin_section(records: Records) -> list[str]:
    """Return the section on GRIFFIN's draft model; empty if it was never measured."""

    def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        cells = [" ".join(f"{share:.1%}"[:-1] for share in shares) for shares in after["same"].values()]
        return [f"| {after['texts']} | {after['num_rows']:,} | {' | '.join(cells)} |"]

    return _section(GRIFFIN, records, lines)


def _section(
    template: str, records: Records, lines: Callable[[dict[str, Any], dict[str, Any]], list[str]]
) -> list[str]:
    before, after = ({r["texts"]: r for r in records if r.get("when") == when} for when in ("before", "after"))
    if not after:
        return []
    recipe = records[0]["recipe"]
    steps = [record for record in records if "seconds" in record]
    ways = list(next(iter(after.values())).get("same", {}))
    return [
        template.format(
            **recipe.get("texts", {})
            | recipe
            | {
                "minutes": steps[-1]["seconds"] / 60,
                "ways": " | ".join(ways),
                "dashes": "|".join(["---"] * len(ways)),
                "table": "\n".join(line for name, found in after.items() for line in lines(before[name], found)),
            }
        )
    ]


def _shares(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


CARD = "MODEL_CARD.md"

TEMPLATE = """# The embedded model

A small decoder of {kind} kind, trained from scratch on public-domain English books (published 1688-1922) with
`swiftbatch train target{options} --data DIR`. It is there so that swiftbatch runs, tests and measures real \
long-form decoding
without a download. It writes period prose; it knows nothing and answers nothing.

| | |
|---|---|
| parameters | {num_parameters:,} ({hidden_size} wide, {num_hidden_layers} layers, tied embedding) |
| attention | {num_attention_heads} heads of {head_dim} over {num_key_value_heads} key-value heads, normed{nets} |
| positions | {max_position_embeddings:,}, rotary with base {rope_theta:,.0f} |
| tokenizer | byte-level BPE, {vocab_size:,} entries; it puts one token in front of every text |
| weights | safetensors, bf16 |
| data | {num_books} books, {num_characters:,} characters, {num_corpus_tokens:,} tokens |
{stages}

## Recipe

bf16 autocast over float32 weights. Muon for the layers' matrices (rate {learning_rate}, decay {weight_decay}),
AdamW for embedding and norms (rate {embedding_learning_rate}); {num_warmup_steps} warm-up steps, linear fall over the
last {decay_share:.0%} of the steps to {final_rate:.0%}; gradients clipped at {gradient_clip}; seed {seed}.

| window | windows per step | tokens | two books by turns | loss of the last tenth |
|---|---|---|---|---|
{kinds}

Windows of all lengths come from the first step on, each with the token in front that every text begins with. Of those
with one book {far_share:.0%} are read far from that token, as the newest stretch of a long text or as some stretches of
one: so the model knows distances that no window of training is long enough for (Zhu et al. 2023, but with text left out
where positions are). Two books by turns make far text the right one (Tworkowski et al. 2023).
{long_texts}
## Figures on unseen books

{num_stretches} stretches of 100,000 tokens of concatenated whole test books, each scored in one forward:
{bits_per_byte:.3f} bits per byte. Beside it the same tokens, scored with the newest {near:,} to {twice_near:,} tokens
in front of them alone: where that is less, the text further back does harm.

| positions | nats per token | without the far text |
|---|---|---|
{losses}

Tokens behind 32,768 others of their book, with so many of the newest in front of them: what far text is worth.

| newest tokens | nats per token |
|---|---|
{windows}

Passages of 16 tokens from another place, whose first 8 are said again so far behind them: how many of the other 8 are
the likeliest then.

| tokens between | continued |
|---|---|
{needles}
"""

LONG_TEXTS = """
Then long texts, read whole, a segment of {segment:,} tokens a step with all that is before it in view; gradients stop
where it begins (Dai et al. 2019). Each segment behind {near:,} tokens is read once more with that many of the newest
alone in front of it, and how far the first view is from the second (Kullback-Leibler divergence) counts so many times
beside the first one's loss, everywhere or where the second gave more to what came. Beside each segment come windows of
512 to 4,096. Rates {learning_rate} and {embedding_learning_rate}, {num_warmup_steps} warm-up steps, linear fall over
the last {decay_share:.0%} of a stage's steps to {final_rate:.0%}.

| long texts | number | tokens of each | books | second view counts | where | seed |
|---|---|---|---|---|---|---|
{rows}
"""


def write_card(folder: Path) -> None:
    """Write the card of a model folder with its parts, unless the model was never scored."""
    records = read_log(folder / "train_log.jsonl")
    trained = next((record for record in records if record.get("when") == "after"), None)
    if trained is None:
        return
    parts = folder / PARTS_FOLDER
    sections = [
        _target_section(folder, records, trained),
        *heads_section(read_log(parts / "tokenswift_log.jsonl")),
        *draft_section(read_log(parts / DRAFT_FOLDER / "draft_log.jsonl")),
        *griffin_section(read_log(parts / "griffin_log.jsonl")),
    ]
    (folder / CARD).write_text("\n".join(sections), encoding="utf-8")


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _target_section(folder: Path, records: list[dict[str, Any]], trained: dict[str, Any]) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    recipe, steps = records[0]["recipe"], [record for record in records if "loss" in record]
    near, far = trained["near_loss_by_position"], trained["long_context"]
    losses = [f"| {span} | {loss:.3f} | {near[span]:.3f} |" for span, loss in trained["loss_by_position"].items()]
    kinds = [_kind_line(kind, [step for step in steps if step["kind"] == kind["name"]]) for kind in recipe["kinds"]]
    figures = config | recipe | records[0]["corpus"] | trained
    return TEMPLATE.format(
        **figures
        | {
            **_kind_words(config),
            "rope_theta": config["rope_parameters"]["rope_theta"],
            "stages": "\n".join(_stage_lines(records)),
            "kinds": "\n".join(kinds),
            "long_texts": _long_texts_section(recipe["long_texts"]),
            "losses": "\n".join(losses),
            "windows": "\n".join(f"| {int(w):,} | {loss:.3f} |" for w, loss in far["loss_by_window"].items()),
            "needles": "\n".join(f"| {int(d):,} | {rate:.1%} |" for d, rate in far["continued_by_distance"].items()),
            "near": NEAR,
            "twice_near": 2 * NEAR - 1,
        }
    )


def _kind_words(config: dict[str, Any]) -> dict[str, str]:
    num_nets, num_layers = config["layer_types"].count("linear_attention"), len(config["layer_types"])
    if not num_nets:
        return {"kind": "Qwen3's", "options": "", "nets": ""}
    heads = f"{config['linear_num_value_heads']} heads of {config['linear_value_head_dim']}"
    over = f"over {config['linear_num_key_heads']} of keys"
    nets = f", with gates; in {num_nets} of {num_layers} layers gated delta nets in its place, {heads} {over}"
    return {"kind": "Qwen3.5's", "options": f" --kind {config['model_type']}", "nets": nets}


def _long_texts_section(recipes: list[dict[str, Any]]) -> str:
    if not recipes:
        return ""
    rows = [_long_texts_line(number, recipe) for number, recipe in enumerate(recipes, start=1)]
    return LONG_TEXTS.format(**recipes[0], rows="\n".join(rows))


def _long_texts_line(number: int, recipe: dict[str, Any]) -> str:
    where = "where it gave more" if recipe["is_near_right_alone"] else "everywhere"
    books = "in pieces of {:,} to {:,}".format(*recipe["pieces"]) if recipe["pieces"] else "to their ends"
    figures = f"{recipe['num_texts']} | {recipe['length']:,} | {books} | {recipe['closeness']:g} times | {where}"
    return f"| {number} | {figures} | {recipe['seed']} |"


def _stage_lines(records: list[dict[str, Any]]) -> list[str]:
    stages: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "stage" in record:
            name = record["stage"]
        if "stage" in record or "loss" in record:
            stages.setdefault(name, []).append(record)
    lines, before = [], 0.0
    for name, of_stage in stages.items():
        steps = [record for record in of_stage if "loss" in record]
        devices = " and ".join(dict.fromkeys(record["device"] for record in of_stage if "stage" in record))
        num_tokens, end = sum(step["num_tokens"] for step in steps), steps[-1]["seconds"]
        took = f"{num_tokens:,} tokens in {len(steps):,} steps, {(end - before) / 60:,.0f} minutes on {devices}"
        lines.append(f"| trained in {name} | {took} |")
        before = end
    return lines


def _kind_line(kind: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    last = [step["loss"] for step in steps[-max(1, len(steps) // 10) :]]
    loss = f"{sum(last) / len(last):.3f}" if last else "-"
    num_tokens = sum(step["num_tokens"] for step in steps)
    return f"| {kind['length']:,} | {kind['batch_size']} | {num_tokens:,} | {kind['mixed_share']:.0%} | {loss} |"
