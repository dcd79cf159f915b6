"""The markers between which a model thinks: those that are named, or those of its tokenizer or its chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swiftbatch.worker.constraints.thinking import Markers

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("◁think▷", "◁/think▷"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)


def markers_of(
    tokenizer: Any, encode: Callable[[str], list[int]], vocab_size: int, named: tuple[str, str] | None
) -> Markers | None:
    """The named markers, else the first known pair that the tokenizer has as tokens or the chat template writes.

    None where there is none. Raises ValueError, for the user, for named ones that can't be.
    """
    pair = named or _own(tokenizer)
    if pair is None:
        return None
    start, end = (tuple(encode(text)) for text in pair)
    problem = _problem(pair, start, end, vocab_size)
    if problem and named:
        raise ValueError(f"--thinking-markers: {problem}")
    return None if problem else Markers(start, end, (pair[0].strip(), pair[1].strip()))


def _own(tokenizer: Any) -> tuple[str, str] | None:
    entries = tokenizer.get_vocab()
    templates = tokenizer.chat_template
    texts = [*templates.values()] if isinstance(templates, dict) else [templates or ""]
    for pair in KNOWN:
        if all(marker in entries for marker in pair):
            return pair
    return next((pair for pair in KNOWN if all(any(marker in text for text in texts) for marker in pair)), None)


def _problem(pair: tuple[str, str], start: tuple[int, ...], end: tuple[int, ...], vocab_size: int) -> str | None:
    for text, token_ids in zip(pair, (start, end), strict=True):
        if not token_ids or max(token_ids) >= vocab_size:
            return f"{text!r} has no tokens of the model's"
        if not text.strip():
            return f"found {text!r}, expected a text that is not blank"
    return f"found {pair[0]!r} twice, expected two that differ" if pair[0].strip() == pair[1].strip() else None
