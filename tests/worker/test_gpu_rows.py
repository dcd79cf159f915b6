"""2,000 rows of trees per kind, across boundaries and on pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from swiftbatch.worker.exactness.forward_comparisons import MAX_LENGTH, NUM_CACHES, probe_rows
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.model.kind_parts import save_tiny, tiny_config
from tests.worker.model.kind_sizes import WINDOWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets; run with TRITON_INTERPRET=0"),
]

WITH_WINDOWS = ("gemma3_text", "gpt_oss")
KINDS = ("qwen3_5_text", "nemotron_h", "lfm2", "qwen3_moe", "deepseek_v3", *WITH_WINDOWS, "bamba")
CHANGES: dict[str, dict[str, Any]] = {"gemma3_text": WINDOWS}  # otherwise no layer of so few sees all
NUM_PROBED = 2000


def small_model(kind: str, folder: Path) -> ModelFiles:
    config = tiny_config(kind, has_wide_heads=True)
    config.update(CHANGES.get(kind, {}))
    save_tiny(config, folder)
    return locate_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "bfloat16") for kind in KINDS), ("qwen3_5_text", "float32"), ("gpt_oss", "float32")]
)
def test_rows_of_a_kind_have_the_bits_of_plain_decoding_across_boundaries_on_cuda(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    slots = SlotsWanted(MAX_LENGTH, num_slots=NUM_CACHES, num_unwritten=0)
    target = TargetModel.load(small_model(kind, tmp_path), dtype, "cuda", slots=slots)
    assert isinstance(target.forwards, CudaForwards)
    assert (target.forwards.arena.windowed is not None) == (kind in WITH_WINDOWS)
    found = probe_rows(target, NUM_PROBED, first_length=BLOCK - 10)
    assert found.num_rows >= NUM_PROBED
    assert found.num_differing == 0, found
