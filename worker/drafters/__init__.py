"""The drafters and their catalogue. Each is imported when it is made, so that the names cost no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.drafters.names import DEFAULT_ENGINE, ENGINE_NAMES

if TYPE_CHECKING:
    from worker.drafters.base import Drafter

__all__ = ["DEFAULT_ENGINE", "DRAFTERS", "ENGINE_NAMES", "DrafterFactory", "create_drafter"]


def _autoregressive(vocab_size: int) -> Drafter:
    from worker.drafters.autoregressive import AutoregressiveDrafter

    return AutoregressiveDrafter()


def _prompt_lookup(vocab_size: int) -> Drafter:
    from worker.drafters.prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(vocab_size)


def _suffix(vocab_size: int) -> Drafter:
    from worker.drafters.suffix import SuffixDrafter

    return SuffixDrafter()


def _token_recycling(vocab_size: int) -> Drafter:
    from worker.drafters.token_recycling import TokenRecyclingDrafter

    return TokenRecyclingDrafter(vocab_size)


def _token_recycling_static(vocab_size: int) -> Drafter:
    from worker.drafters.static_recycling import StaticTokenRecyclingDrafter

    return StaticTokenRecyclingDrafter(vocab_size)


def _token_recycling_static_80(vocab_size: int) -> Drafter:
    from worker.drafters.static_recycling import PaperTokenRecyclingDrafter

    return PaperTokenRecyclingDrafter(vocab_size)


def _token_recycling_no_noise(vocab_size: int) -> Drafter:
    from worker.drafters.token_recycling import TokenRecyclingDrafter

    return TokenRecyclingDrafter(vocab_size, with_noise=False)


DrafterFactory = Callable[[int], "Drafter"]
"""Makes a drafter for a vocabulary of so many tokens."""

DRAFTERS: dict[str, DrafterFactory] = {
    "autoregressive": _autoregressive,
    "prompt-lookup": _prompt_lookup,
    "suffix": _suffix,
    "token-recycling": _token_recycling,
    "token-recycling-static": _token_recycling_static,
    "token-recycling-static-80": _token_recycling_static_80,
    "token-recycling-no-noise": _token_recycling_no_noise,
}


def create_drafter(name: str, vocab_size: int) -> Drafter:
    """Make the drafter of an engine. Raises ValueError for an unknown name."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown engine {name!r}; expected one of: {', '.join(DRAFTERS)}")
    return DRAFTERS[name](vocab_size)
