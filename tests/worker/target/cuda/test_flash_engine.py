"""The engine over attention with flash-attn's prefixes, by a stub of it, in steps that a graph could replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.kernels.cuda import flash_stub
from tests.worker.target.cuda.checked_graph import CheckedGraph
from tests.worker.target.cuda.cuda_parts import cuda_target, offloaded_target
from tests.worker.target.cuda.test_cuda_engine import LAUNCHES_PER_LAYER, generated
from worker.model.files import ModelFiles, locate_model
from worker.target.target import TargetModel


@pytest.fixture
def files(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    flash_stub.install(monkeypatch)
    return locate_model(str(tiny_model))


def flash_target(files: ModelFiles, num_slots: int = 2) -> TargetModel:
    return cuda_target(files, torch.bfloat16, num_slots, attention="flash")


def test_tokens_do_not_depend_on_drafts_or_on_what_shares_a_step(files: ModelFiles) -> None:
    together = generated(flash_target(files), "token-recycling", 3)
    assert generated(flash_target(files, 1), "autoregressive", 3, num_at_a_time=1) == together


def test_caches_outside_the_device_change_no_token(files: ModelFiles) -> None:
    offloaded = offloaded_target(files, torch.bfloat16, attention="flash")
    assert generated(offloaded, "token-recycling", 3) == generated(flash_target(files), "token-recycling", 3)


def test_a_layer_is_ten_launches_and_the_numerics_name_them(files: ModelFiles) -> None:
    target = flash_target(files)
    forward = target.forwards._graph  # type: ignore[attr-defined]
    assert isinstance(forward, CheckedGraph)
    assert len(forward.launches) == target.cache_shape.num_layers * LAUNCHES_PER_LAYER + 3
    assert target.forwards.numerics.endswith(", triton kernels 1, flash 2.8.3 prefixes in splits of 256, triton")
