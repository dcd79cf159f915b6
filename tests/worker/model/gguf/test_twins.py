"""A GGUF file gives the exact logits of a twin made by other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.model_files import locate_model, read_config
from tests.worker.model.gguf.tiny_gguf import TINY, TOKENS, write_tiny

pytestmark = pytest.mark.long

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKEN_IDS = [(7 * number + 3) % len(TOKENS) for number in range(48)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(model: Path, dtype: str) -> torch.Tensor:
    target = TargetModel.load(locate_model(str(model)), dtype, "cpu")
    return target.logits(target.read(target.new_cache(64), TOKEN_IDS))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in TINY),
        *(pytest.param(name, "float32", marks=pytest.mark.slow if number else ()) for number, name in enumerate(TINY)),
    ],
)
def test_logits_are_those_of_the_dequantized_twin(name: str, dtype: str, tmp_path: Path) -> None:
    file, twin = write_tiny(name, tmp_path, DTYPES[dtype])
    logits = logits_of(file, dtype)
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert torch.equal(logits, logits_of(twin, dtype))


@pytest.mark.parametrize("name", TINY)
def test_dense_architectures_run_in_our_kernels(name: str, tmp_path: Path) -> None:
    files = locate_model(str(write_tiny(name, tmp_path, torch.bfloat16)[0]))
    path = path_on("cuda", read_config(files.name, files.path))
    assert path.name == "kernels", path
