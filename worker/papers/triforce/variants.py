"""Variants of TriForce that comparisons run: the paper's own settings."""

from __future__ import annotations

import functools

from swiftbatch.worker.bench.compared_caches import RetrievalKVCache
from swiftbatch.worker.drafters.catalogue import DrafterFactory
from swiftbatch.worker.papers.triforce.triforce import TriForceOptions, triforce

PAPER = TriForceOptions(cache=RetrievalKVCache, budget=4096, gammas=(2, 6))
VARIANTS: dict[str, DrafterFactory] = {"triforce-paper": functools.partial(triforce, options=PAPER)}
