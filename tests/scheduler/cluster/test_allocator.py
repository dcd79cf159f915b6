"""Workers choose how torch divides a GPU's memory, unless the user does."""

from __future__ import annotations

import os

import pytest

from swiftbatch.scheduler.cluster.worker_actor import ALLOCATOR_SETTINGS, prefer_expandable_segments


@pytest.mark.parametrize("given", [None, *ALLOCATOR_SETTINGS])
def test_a_worker_s_segments_are_expandable_unless_a_user_has_set_the_allocator(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "before")  # restored afterwards
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(given, "backend:cudaMallocAsync")
    prefer_expandable_segments()
    found = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ}
    assert found == (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if given is None else {given: "backend:cudaMallocAsync"}
    )
