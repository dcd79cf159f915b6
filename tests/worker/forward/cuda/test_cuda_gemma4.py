"""Gemma 4, whose heads have two widths, through GPU forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import chain_rows, tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kv.kv_capacity import HeldPositions, WindowPages
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.forward.cuda.cuda_parts import (
    PAGE,
    check_drafts_beside_a_resumed_job,
    check_rows_of_two_trees,
    cuda_target,
)
from tests.worker.kv.memory.test_packed_sizes import loaded_bytes
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import make_twins
from tests.worker.model.gemma4_configs import GEMMA4, write_gemma4

pytestmark = pytest.mark.long

DENSE, WITH_EXPERTS = "Gemma 4 31B", "Gemma 4 26B A4B"
EACH = pytest.mark.parametrize("name", GEMMA4)
TEXT = [7 * each % 200 for each in range(232)]
TREE = DraftTree([9, 8, 7, 6, 5, 4, 3], [-1, 0, 0, 1, 3, 4, 4])


def files_of(name: str, folder: Path) -> ModelFiles:
    write_gemma4(name, folder)
    return locate_model(str(folder))


def read_to(target: TargetModel, cache: Any, end: int) -> None:
    while cache.length < end:
        target.read(cache, TEXT[cache.length : end])


@pytest.mark.parametrize("num_rows", [40, pytest.param(200, marks=pytest.mark.slow)])
@EACH
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    found = compare(cuda_target(files_of(name, tmp_path), torch.float32, 1, 250, "cublas"), num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows
