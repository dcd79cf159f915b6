"""The engine over a stub of flash-attn's prefixes, in capturable steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.forward.cuda.test_cuda_engine import LAUNCHES_PER_LAYER, generated
from tests.worker.kernels.cuda import flash_stub

pytestmark = pytest.mark.long

PROMPTS = (6, 64)  # the second one is a whole block and becomes a prefix


@pytest.fixture(scope="module")
def files(one_layer_model: Path) -> Iterator[ModelFiles]:
    with pytest.MonkeyPatch.context() as patches:
        flash_stub.install(patches)
        yield locate_model(str(one_layer_model))


@pytest.fixture(scope="module")
def together(files: ModelFiles) -> list[list[int]]:
    with np.errstate(all="ignore"):
        return generated(flash_target(files), "token-recycling", 2, PROMPTS)


def flash_target(files: ModelFiles, num_slots: int = 2) -> TargetModel:
    return cuda_target(files, torch.bfloat16, num_slots, attention="flash")


def test_tokens_do_not_depend_on_drafts_or_on_what_shares_a_step(files: ModelFiles, together: list[list[int]]) -> None:
    assert generated(flash_target(files, 1), "autoregressive", 2, PROMPTS, num_at_a_time=1) == together


def test_a_layer_is_ten_launches_and_the_numerics_name_them(files: ModelFiles) -> None:
    target = flash_target(files)
    forward = target.forwards._captured[0].graph  # type: ignore[attr-defined]
    assert isinstance(forward, CheckedGraph)
    assert len(forward.launches) == target.cache_shape.num_layers * LAUNCHES_PER_LAYER + 4  # once the pages
    assert target.forwards.numerics.endswith(", triton kernels 2, flash 2.8.3 prefixes in splits of 512, triton")
