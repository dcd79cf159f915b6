"""Llama-Nemotron's NAS models through GPU forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import chain_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.forward.cuda.cuda_parts import (
    check_drafts_beside_a_resumed_job,
    check_rows_of_two_trees,
    cuda_target,
)
from tests.worker.kv.memory.test_packed_sizes import loaded_bytes
from tests.worker.model.nas_configs import PUBLISHED, publish

pytestmark = pytest.mark.long

TEXT = [7 * each % 64 for each in range(68)]


def files_of(name: str, folder: Path) -> ModelFiles:
    publish(name, folder)
    return locate_model(str(folder))


@pytest.mark.parametrize("num_rows", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    found = compare(cuda_target(files_of(name, tmp_path), torch.float32, 1, 250, "cublas"), num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_two_trees_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    check_rows_of_two_trees(cuda_target(files_of(name, tmp_path), torch.bfloat16), 4, TEXT[:64], TEXT[64:])


@pytest.mark.slow  # rows of trees have those bits, as the test above shows
def test_drafts_beside_a_resumed_job_give_plain_decoding_s_tokens(tmp_path: Path) -> None:
    target = cuda_target(files_of("Super 49B", tmp_path), torch.float32, linear="cublas")
    check_drafts_beside_a_resumed_job(target, 3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_layer_s_output_is_that_of_a_cpu_also_of_layers_without_parts(name: str, tmp_path: Path) -> None:
    files = files_of(name, tmp_path)
    targets = cuda_target(files, torch.float32, 1, linear="cublas"), TargetModel.load(files, "float32", "cpu")
    found, expected = (
        target.forwards.run([chain_rows(target.new_cache(100), TEXT[:5])], (0, 1, 2, 3, 4))[0] for target in targets
    )
    assert found.shape == expected.shape == (5, 5 * 128)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert float(expected.std()) > 0.5


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_counts_the_bytes_of_the_parts_that_a_layer_has(name: str, tmp_path: Path) -> None:
    files = files_of(name, tmp_path)
    weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
    assert weights is not None
    assert sizes is not None
    assert sizes.weight_bytes == loaded_bytes(stacked_weights(weights, torch.device("cpu")))
