"""Stages that break in every way, and one that works."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.gpu.everything import GPUStage
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding

if TYPE_CHECKING:
    from bench.gpu.trial import Trial, Try

GOOD = Finding(passed=True, words="it is as it should be", rows=[{"what": "a number", "ms": 1.5}])


def good(trial: Trial) -> Iterator[Try]:
    yield "a try", lambda: GOOD


def raising(trial: Trial) -> Iterator[Try]:
    yield "breaks", lambda: Finding(passed=1 // 0 == 0, words="", rows=[])
    yield "is tried all the same", lambda: GOOD


def unprepared(trial: Trial) -> Iterator[Try]:
    raise ValueError("no such model")
    yield


def hanging(trial: Trial) -> Iterator[Try]:
    yield "before", lambda: GOOD
    time.sleep(600)


def dying(trial: Trial) -> Iterator[Try]:
    yield "before", lambda: GOOD
    print("an illegal memory access was encountered", file=sys.stderr, flush=True)
    os._exit(7)


STAGES = tuple(
    GPUStage(name, f"{__name__}:{name}", seconds, (f"the item of {name}",))
    for name, seconds in (("raising", 300), ("unprepared", 300), ("hanging", 2), ("dying", 300), ("good", 300))
)
