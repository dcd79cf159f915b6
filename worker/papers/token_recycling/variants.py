"""Variants of token recycling that comparisons run: the paper's static tree, and trees that know no noise."""

from __future__ import annotations

import functools

from swiftbatch.worker.drafters.catalogue import DrafterFactory
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.papers.token_recycling.static_recycling import StaticTokenRecyclingDrafter

VARIANTS: dict[str, DrafterFactory] = {
    "token-recycling-static": StaticTokenRecyclingDrafter,
    "token-recycling-static-80": lambda target, *_: StaticTokenRecyclingDrafter(target, None),
    "token-recycling-no-noise": functools.partial(TokenRecyclingDrafter, with_noise=False),
}
