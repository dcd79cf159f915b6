"""Compute threads, and the memory that they may still read."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}  # `element` of source/api.h

Free = Callable[[int], None]


class Team:
    """The calling thread, and helpers that start when there is work."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"found {num_threads} threads, expected 1 or more")
        self.library = library
        self.lock = threading.Lock()  # allows one call at a time
        self.handle: int = library.team_new(num_threads)
        self._held: list[Any] = []
        self._retired: list[tuple[Free, int]] = []
        weakref.finalize(self, _close, library, self.handle, self._retired)

    def hold(self, read: Any) -> None:
        """Keep a call's inputs alive while a late helper may read them."""
        is_busy = self.library.team_is_busy(self.handle)
        self._held = [*self._held, read] if is_busy else []
        if not is_busy:
            _free(self._retired)

    def retire(self, free: Free, handle: int) -> None:
        """Free weights once no helper may read them."""
        self._retired.append((free, handle))


_teams: weakref.WeakValueDictionary[tuple[str, int], Team] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def shared_team(library: ctypes.CDLL, num_threads: int) -> Team:
    """Return the library's only team of this size; two teams would compete for cores."""
    with _teams_lock:
        team = _teams.get((library._name, num_threads))
        if team is None:
            team = _teams[library._name, num_threads] = Team(library, num_threads)
        return team


def _close(library: ctypes.CDLL, handle: int, retired: list[tuple[Free, int]]) -> None:
    library.team_free(handle)
    _free(retired)


def _free(retired: list[tuple[Free, int]]) -> None:
    while retired:
        free, handle = retired.pop()
        free(handle)
