"""The sections of a model card on trained parts, each from the log of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Return the section on TokenSwift's heads; nothing where they were never measured."""

    def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        pairs = zip(before["top"], after["top"], strict=True)
        return [
            f"| {after['texts']} | {after['num_rows']:,} | {number} | {_shares(one)} | {_shares(two)} |"
            for number, (one, two) in enumerate(pairs, start=1)
        ]

    return _section(HEADS, records, lines)


def draft_section(records: Records) -> list[str]:
    """Return the section on TriForce's draft model; nothing where it was never measured."""

    def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        cells = [f"{_shares([before['same'][way]])} / {_shares([share])}" for way, share in after["same"].items()]
        return [f"| {after['texts']} | {after['num_rows']:,} | {' | '.join(cells)} |"]

    return _section(DRAFT, records, lines)


def griffin_section(records: Records) -> list[str]:
    """Return the section on GRIFFIN's draft model; nothing where it was never measured."""

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
