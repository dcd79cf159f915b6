"""Every small kind of model against transformers, on a GPU.

Triton's interpreter runs the same in `tests/worker/forward/cuda/` and `tests/worker/kernels/cuda/`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import triton
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swiftbatch.worker.exactness.forward_comparisons import MAX_LENGTH, NUM_CACHES, compare, probe_rows
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.gemma4_configs import GEMMA4, write_gemma4
from tests.worker.model.kind_parts import save_tiny, tiny_config
from tests.worker.model.mimo_configs import write_mimo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets; run with TRITON_INTERPRET=0"),
]

OTHERS = {"deepseek_v4", "granitemoehybrid", "kimi_linear", "mimo_v2_flash"}  # published forms of some are below
RUN = {kind: form for kind, form in ARCHITECTURES.items() if form.kernels_lack is None and kind not in OTHERS}
NUM_COMPARED, NUM_PROBED = 200, 60  # rows; windows have 100 positions
SINCE = {"bamba": "5.23", "cohere2_moe": "5.23"}  # transformers 5.17 has another forward or config


@pytest.mark.parametrize("kind", RUN)
def test_a_kind_says_what_transformers_says_and_its_rows_are_exact_on_cuda(kind: str, tmp_path: Path) -> None:
    if kind not in CONFIG_MAPPING or Version(transformers.__version__) < Version(SINCE.get(kind, "5")):
        pytest.skip(f"transformers {transformers.__version__} has no such kind, or another forward")
    save_tiny(tiny_config(kind, has_wide_heads=True), tmp_path)
    check_model(tmp_path, torch.device("cuda"))


@pytest.mark.parametrize("name", GEMMA4)
def test_heads_of_two_widths_do_so_on_cuda(name: str, tmp_path: Path) -> None:
    write_gemma4(name, tmp_path)
    check_model(tmp_path, torch.device("cuda"))


def test_values_narrower_than_keys_do_so_on_cuda(tmp_path: Path) -> None:
    write_mimo(tmp_path)
    check_model(tmp_path, torch.device("cuda"))


def check_model(folder: Path, device: torch.device, num_compared: int = NUM_COMPARED) -> None:
    parts = Parts.of(locate_model(str(folder)), "float32", device)
    assert parts.loaded is not None
    target = parts.target(NUM_CACHES, MAX_LENGTH)
    found = compare(target, num_compared)
    assert found.agrees, found
    assert probe_rows(target, min(NUM_PROBED, num_compared)).num_differing == 0
