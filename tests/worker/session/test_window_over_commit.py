"""Forty jobs in pages for six, with window layers.

Without a model: a token is a digest of its row's visible rows in each layer.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_room import CachedJob, CacheRoom
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import (
    NUM_ASKED,
    Growth,
    HeldPositions,
    PagesError,
    PoolSize,
    WindowPages,
    pages_of,
)
from swiftbatch.worker.kv.slot_arena import KVArena
from tests.worker.kv.window_parts import spoil_free_pages

NUM_JOBS, NUM_FITTING, LONGEST, PAGE, WINDOW, VOCAB = 40, 6, 320, 64, 40, 8
SEGMENT = 32  # positions
SHAPE = CacheShape(2, 1, 32, torch.float32, torch.device("cpu"), windows=(WINDOW, None))
HELD = HeldPositions(WINDOW + BLOCK + NUM_ASKED + PAGE + SEGMENT, 0.0)
SYSTEM = [number * 5 % VOCAB for number in range(90)]  # half of the prompts begin with it
DRAFTS = [1, 3, 4, 6]  # candidates of each step


@dataclass
class Text:
    number: int
    prompt: list[int]
    num_tokens: int
    token_ids: list[int] = field(default_factory=list)
    segments: list[Any] = field(default_factory=list)

    @property
    def num_shared(self) -> int:
        return len(SYSTEM) if self.prompt[: len(SYSTEM)] == SYSTEM else 0

    @property
    def has_ended(self) -> bool:
        return len(self.token_ids) >= len(self.prompt) + self.num_tokens


def texts() -> list[Text]:
    rng = random.Random(1)
    made = []
    for number in range(NUM_JOBS):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(20, 100))]
        prompt = SYSTEM + prompt if number % 2 else prompt
        made.append(Text(number, prompt, rng.randint(40, 110), list(prompt)))
    return made


def write(cache: FullKVCache, position: int, token_ids: list[int]) -> None:
    """Write rows of a root and children, or known tokens."""
    for layer in range(SHAPE.num_layers):
        rows = torch.tensor(token_ids)[None, :, None] * (layer + 2) + torch.arange(32)
        cache.write(layer, position, rows.float(), -rows.float())


def read_to(cache: FullKVCache, token_ids: list[int]) -> None:
    while cache.length < len(token_ids):
        part = token_ids[cache.length : cache.length + 30]
        write(cache, cache.length, part)
        cache.advance(len(part))


def step(text: Text, cache: FullKVCache) -> None:
    """Draw a token, or two if a child matches."""
    root = len(text.token_ids) - 1
    write(cache, root, [text.token_ids[-1], *DRAFTS])
    drawn = draw(text, cache, root)
    path = [DRAFTS.index(drawn)] if drawn in DRAFTS else []
    text.token_ids.append(drawn)
    cache.commit(path)
    if path:
        text.token_ids.append(draw(text, cache, root + 1))
    del text.token_ids[len(text.prompt) + text.num_tokens :]
    if cache.length >= len(text.token_ids):
        cache.roll_back(len(text.token_ids) - 1)


def draw(text: Text, cache: FullKVCache, position: int) -> int:
    seen = hashlib.sha256(bytes([text.number]))
    for layer, window in enumerate(SHAPE.windows):
        first = 0 if window is None else max(0, position + 1 - window)
        for rows in cache.stored_between(layer, slice(first, position + 1)):
            seen.update(rows.numpy().tobytes())
    return seen.digest()[0] % VOCAB


def alone(text: Text) -> list[int]:
    cache = FullKVCache(SHAPE, LONGEST)
    while not text.has_ended:
        read_to(cache, text.token_ids[:-1])
        step(text, cache)
    return text.token_ids


class Worker:
    """As many texts begin as should fit, and the youngest leave if they don't."""

    def __init__(self) -> None:
        num_pages = NUM_FITTING * pages_of(LONGEST, PAGE)
        windows = WindowPages(NUM_FITTING * pages_of(HELD.num_whole, PAGE), HELD)
        self.arena = KVArena(SHAPE, NUM_JOBS, LONGEST, PoolSize(num_pages, PAGE, windows))
        spoil_free_pages(self.arena)
        self.room = CacheRoom(self.arena.pool_size, arena=self.arena)
        self.running: dict[int, Any] = {}
        self.num_left = self.num_killed = self.num_copied = 0

    def begin(self, text: Text) -> None:
        """Resume from segments, or copy another's prompt."""
        cache = self.arena.new_cache(LONGEST)
        others = [job.cache for job in self.running.values() if job.text.num_shared and text.num_shared]
        cache.retain(0, text.num_shared)
        source = max(others, key=lambda each: each.copyable_end(text.num_shared), default=None)
        if text.segments:
            for kv in text.segments:
                cache.load(kv)
        elif source is not None and (end := source.copyable_end(text.num_shared)):
            cache.copy_from(source, end)
            self.num_copied += 1
        cache.retain(sum(kv.shape[1] for kv in text.segments))
        self.running[text.number] = SimpleNamespace(text=text, sequence=text.token_ids, cache=cache)

    def leave(self, number: int, is_written: bool) -> Text:
        job = self.running.pop(number)
        if is_written:
            self.write_segments(job, 1)
        text: Text = job.text
        return text

    def write_segments(self, job: Any, least: int = SEGMENT) -> None:
        start = sum(kv.shape[1] for kv in job.text.segments)
        if job.cache.length - start >= least:
            job.text.segments.append(np.array(job.cache.kv(start, job.cache.length)))
            job.cache.release(job.cache.length)

    def make_room(self) -> list[Text]:
        jobs = sorted(self.running.values(), key=lambda job: job.text.number, reverse=True)
        gc.collect()
        growths = [Growth(len(job.sequence), LONGEST, job.text.num_shared) for job in jobs]
        cached = [CachedJob(job.cache, growth) for job, growth in zip(jobs, growths, strict=True)]
        leaving = jobs[: self.room.num_without_room(cached)]
        del cached
        self.num_left += len(leaving)
        return [self.leave(job.text.number, is_written=True) for job in leaving]

    def advance(self) -> list[Text]:
        ended = []
        for job in list(self.running.values()):
            read_to(job.cache, job.text.token_ids[:-1])
            step(job.text, job.cache)
            self.write_segments(job)
            if job.text.has_ended:
                ended.append(self.leave(job.text.number, is_written=False))
        return ended


@pytest.fixture
def _few_objects() -> Iterator[None]:
    """The collector runs at every step."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_few_objects")
def test_forty_jobs_in_pages_for_six_have_the_tokens_that_each_has_alone() -> None:
    worker, waiting, ended, rng = Worker(), texts(), list[Text](), random.Random(2)
    while len(ended) < NUM_JOBS:
        while waiting and (len(worker.running) < 9 or rng.random() < 0.3):
            try:
                worker.begin(waiting[0])
            except PagesError:
                break
            del waiting[0]
        waiting = sorted([*waiting, *worker.make_room()], key=lambda text: text.number)
        ended += worker.advance()
        if worker.running and rng.random() < 0.1:
            waiting.insert(0, worker.leave(rng.choice(list(worker.running)), is_written=False))
            worker.num_killed += 1
    expected = {text.number: alone(text) for text in texts()}
    assert {text.number: text.token_ids for text in ended} == expected
    assert min(worker.num_left, worker.num_killed, worker.num_copied) > 0
    gc.collect()
    assert worker.arena.num_free_pages == worker.arena.num_pages
    assert worker.arena.windowed.num_free_pages == worker.arena.windowed.num_pages
