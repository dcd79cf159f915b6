"""Variants of TokenSwift that comparisons run: the paper's own settings."""

from __future__ import annotations

import functools

from swiftbatch.worker.bench.compared_caches import ImportanceKVCache
from swiftbatch.worker.drafters.catalogue import DrafterFactory
from swiftbatch.worker.papers.tokenswift.tokenswift import TokenSwiftOptions, tokenswift

PAPER = TokenSwiftOptions(cache=ImportanceKVCache, budget=4096, draft_rounds=1, recycles=False)
VARIANTS: dict[str, DrafterFactory] = {"tokenswift-paper": functools.partial(tokenswift, options=PAPER)}
