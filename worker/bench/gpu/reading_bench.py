"""Prompts and checkpoints on a GPU: tokens read a second, and a cache that is taken out and put into another slot."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch

from swiftbatch.worker.bench.gpu.records import GPUResumeRecord, ReadRecord
from swiftbatch.worker.exactness.first_run.parts import Parts

PIECE = 1024  # positions of a checkpoint's segment


def read_records(parts: Parts, starts: Sequence[int], num_tokens: int) -> Iterator[ReadRecord]:
    """Known tokens behind caches of these lengths: a prompt's, or those of a job that is replayed."""
    longest = max(starts) + num_tokens
    target = parts.target(1, longest)
    target.arena.buffer.normal_(generator=parts.generator(6))
    cache, rng = target.new_cache(longest), random.Random(0)
    token_ids = [rng.randrange(target.vocab_size) for _ in range(num_tokens)]
    target.read(cache, token_ids[:1])
    for start in starts:
        cache.length = start
        target.synchronize()
        started = time.perf_counter()
        while cache.length < start + num_tokens:
            target.read(cache, token_ids[cache.length - start :])
        target.synchronize()
        yield ReadRecord(start=start, num_tokens=num_tokens, seconds=time.perf_counter() - started)


def resume_record(parts: Parts, length: int) -> GPUResumeRecord:
    """Keys and values of a slot to the host, piece by piece as checkpoints take them, and into another slot."""
    target = parts.target(2, length)
    target.arena.buffer.normal_(generator=parts.generator(7))
    cache, resumed = (target.new_cache(length) for _ in range(2))
    cache.length = length
    out_seconds = in_seconds = 0.0
    for start in range(0, length, PIECE):
        target.synchronize()
        times = [time.perf_counter()]
        kv = cache.kv(start, min(start + PIECE, length))
        times.append(time.perf_counter())
        resumed.load(kv)
        target.synchronize()
        times.append(time.perf_counter())
        out_seconds, in_seconds = out_seconds + times[1] - times[0], in_seconds + times[2] - times[1]
    return GPUResumeRecord(
        length=length,
        num_bytes=length * parts.cache_shape().bytes_per_position(),
        out_seconds=out_seconds,
        in_seconds=in_seconds,
        same_bits=_same_bits(*(target.arena.buffer[:, :, each.slot, :, :length] for each in (cache, resumed))),
    )


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether all bits are the same, layer by layer: a copy of all would have no room."""
    whole = torch.int16 if ours.element_size() == 2 else torch.int32
    return all(torch.equal(a.view(whole), b.view(whole)) for a, b in zip(ours, theirs, strict=True))
