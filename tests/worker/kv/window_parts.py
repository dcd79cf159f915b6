"""Caches that forget often, leaving NaN."""

from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.kv import sliding_windows
from swiftbatch.worker.kv.slot_arena import KVArena

EVERY = 64


def spoil_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers forget after few positions, leaving NaN or wrong codes."""
    monkeypatch.setattr(sliding_windows, "FORGETS_EVERY", EVERY)
    monkeypatch.setattr(sliding_windows, "give_back", spoil)


def spoil(rows: torch.Tensor) -> None:
    if rows.is_floating_point():
        rows.fill_(torch.nan)
    else:
        rows.view(torch.uint8).fill_(255)  # their scales are NaN, too


def spoil_free_pages(arena: KVArena) -> None:
    """Fill pages now and whenever one is freed."""
    pool, buffer, page = arena.windowed.pool, arena.windowed.buffer, arena.page
    give_back = pool.give_back

    def give_back_and_spoil(pages: list[int], num_kept: int = 0) -> None:
        before = set(pool._free)
        give_back(pages, num_kept)
        for number in set(pool._free) - before:
            spoil(buffer[..., number * page : (number + 1) * page, :])

    pool.give_back = give_back_and_spoil  # type: ignore[method-assign]
    spoil(buffer)
