"""The partial caches that tables compare, by the names that their arms use; user's engines have the summarised one."""

from __future__ import annotations

import functools
from typing import Any

from swiftbatch.worker.bench.caches.importance import ImportanceKVCache
from swiftbatch.worker.bench.caches.quantized import QuantizedKVCache
from swiftbatch.worker.bench.caches.retrieval import HeavyHitterKVCache, RetrievalKVCache, StreamingKVCache
from swiftbatch.worker.caches.partial import PartialCacheFactory
from swiftbatch.worker.caches.summary import SummaryKVCache

PARTIAL_CACHES: dict[str, PartialCacheFactory] = {
    "summary": SummaryKVCache,  # the most important chunks, and the others as one entry each
    "dynamic": ImportanceKVCache,  # the most important positions, new ones in place of the least important
    "static": functools.partial(ImportanceKVCache, is_static=True),  # the same, built once, behind the prompt
    "full": lambda shape, _, sequence, *room: ImportanceKVCache(shape, sequence.max_length, sequence, *room),  # all
    "retrieval": RetrievalKVCache,  # the chunks that the newest query attends to most
    "streaming": StreamingKVCache,  # the newest positions
    "h2o": HeavyHitterKVCache,  # half the newest, half those that had most attention so far
    "quantized": QuantizedKVCache,  # all, in as many bits as the budget says
    "topk": functools.partial(ImportanceKVCache, period=1),  # as dynamic, chosen before every draft
}


def with_cache(options: dict[str, Any]) -> dict[str, Any]:
    """An arm's options with its partial cache in place of the cache's name or of a chunk size."""
    if "chunk_size" in options:
        cache = functools.partial(RetrievalKVCache, chunk_size=options["chunk_size"])
        return {name: value for name, value in options.items() if name != "chunk_size"} | {"cache": cache}
    return options | {"cache": PARTIAL_CACHES[options["cache"]]} if "cache" in options else options
