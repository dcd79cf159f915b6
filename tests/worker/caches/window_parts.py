"""Caches that forget more often than in earnest, and whose forgotten numbers are none."""

from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.caches import windowed

EVERY = 64


def spoil_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers forget after a few positions; what they forget is NaN, or codes that are far off."""
    monkeypatch.setattr(windowed, "FORGETS_EVERY", EVERY)
    monkeypatch.setattr(windowed, "give_back", spoil)


def spoil(rows: torch.Tensor) -> None:
    if rows.is_floating_point():
        rows.fill_(torch.nan)
    else:
        rows.view(torch.uint8).fill_(255)  # their scales are NaN, too
