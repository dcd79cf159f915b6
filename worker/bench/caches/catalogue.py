"""The draft caches that tables compare, by the names that their arms use; user's engines have the summarised one."""

from __future__ import annotations

import functools
from typing import Any

from worker.bench.caches.partial import PartialKVCache
from worker.bench.caches.retrieval import HeavyHitterKVCache, RetrievalKVCache, StreamingKVCache
from worker.caches.draft_cache import DraftCacheFactory
from worker.caches.summary import SummaryKVCache

DRAFT_CACHES: dict[str, DraftCacheFactory] = {
    "summary": SummaryKVCache,  # the most important chunks, and the others as one slot each
    "dynamic": PartialKVCache,  # the most important positions, new ones in place of the least important
    "static": functools.partial(PartialKVCache, is_static=True),  # the same, built once, behind the prompt
    "full": lambda shape, _, sequence: PartialKVCache(shape, sequence.max_length, sequence),  # everything
    "retrieval": RetrievalKVCache,  # the chunks that the newest query attends to most
    "streaming": StreamingKVCache,  # the newest positions
    "h2o": HeavyHitterKVCache,  # half the newest, half those that had most attention so far
    "topk": functools.partial(PartialKVCache, period=1),  # as dynamic, chosen before every draft
}


def with_cache(options: dict[str, Any]) -> dict[str, Any]:
    """An arm's options with its draft cache in place of the cache's name or of a chunk size."""
    if "chunk_size" in options:
        cache = functools.partial(RetrievalKVCache, chunk_size=options["chunk_size"])
        return {name: value for name, value in options.items() if name != "chunk_size"} | {"cache": cache}
    return options | {"cache": DRAFT_CACHES[options["cache"]]} if "cache" in options else options
