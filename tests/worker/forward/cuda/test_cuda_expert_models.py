"""Models with experts through GPU forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward import expert_counts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.forward.cuda.cuda_parts import check_drafts_beside_a_resumed_job, check_rows_of_two_trees, cuda_target
from tests.worker.kv.memory.test_packed_sizes import loaded_bytes
from tests.worker.model.expert_configs import WITH_EXPERTS, write_experts
from tests.worker.model.formats.examples import fp8
from tests.worker.model.formats.test_native_experts import stored, write_gpt_oss
from tests.worker.model.formats.twins import make_twins

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
TRIED = "gpt-oss 120B"  # others only differ in data


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    write_experts(WITH_EXPERTS[name] | changes, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "num_rows"), [(TRIED, 40), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in WITH_EXPERTS)]
)
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    target = cuda_target(locate_model(str(folder_of(name, tmp_path))), torch.float32, 1, 250, "cublas")
    found = compare(target, num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3 30B A3B", TRIED])
def test_rows_of_two_trees_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    target = cuda_target(locate_model(str(folder_of(name, tmp_path))), torch.bfloat16)
    check_rows_of_two_trees(target, 12, [3, 9, 27, 17])


def test_drafts_beside_a_resumed_job_give_plain_decoding_s_tokens(tmp_path: Path) -> None:
    folder = folder_of("Qwen3 30B A3B", tmp_path, num_hidden_layers=1)
    target = cuda_target(locate_model(str(folder)), torch.bfloat16)
    check_drafts_beside_a_resumed_job(target, 4)


def test_the_experts_that_rows_meet_are_counted_as_on_a_cpu_and_learned_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = locate_model(str(folder_of("Qwen3 30B A3B", tmp_path)))
    targets = TargetModel.load(files, "float32", "cpu"), cuda_target(files, torch.float32, 1, linear="cublas")
    caches = [target.new_cache(100) for target in targets]
    monkeypatch.setattr(expert_counts, "LOOKS_EVERY", 2)
    ours, theirs = (target.forwards.expert_counts for target in targets)
    assert ours is not None
    assert theirs is not None
    for token_ids in ([5], [5, 6, 7, 8], [5, 6], [9, 3, 7, 1]):
        for target, cache in zip(targets, caches, strict=True):
            target.verify([tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:]))])
    assert theirs.num_steps == 2, "a copy was queued behind the second forward, and had come with the third"
    assert ours.newest() == theirs.newest() > 8
    for mine, its in zip(ours.seen(), theirs.seen(), strict=True):
        assert mine.tolist() == its.tolist()
    theirs.forget()
    assert len(theirs.seen()[0]) == 0


Twins = Callable[[str], tuple[Path, Path]]
FP8_MODELS = {"FP8": "Qwen3 30B A3B", "FP8 beside what all rows meet": "GLM 4.5"}


@pytest.fixture(scope="module")
def packed_and_dense(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """Packed models and their dequantized twins."""

    @functools.cache
    def folders(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("packed-experts")
        if kind == "MXFP4":
            return write_gpt_oss(folder)
        return make_twins(fp8([128, 128]), folder, *stored(FP8_MODELS[kind], folder / "plain"))

    return folders


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [*FP8_MODELS, "MXFP4"])
def test_packed_experts_stay_so_and_take_what_the_plan_counts(kind: str, packed_and_dense: Twins) -> None:
    files = locate_model(str(packed_and_dense(kind)[0]))
    weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
    assert weights is not None
    assert sizes is not None
    stacked = stacked_weights(weights, CPU)
    experts = [layer.experts for layer in stacked.layers if layer.experts is not None]
    assert all(isinstance(each.weight, PackedMatrix) for own in experts for each in (own.gate_up, own.down))
    assert sizes.weight_bytes == loaded_bytes(stacked)


@pytest.mark.parametrize("kind", ["FP8", "MXFP4"])
def test_packed_experts_give_their_twins_logits(kind: str, packed_and_dense: Twins) -> None:
    rows, logits = [7 * each % 64 for each in range(7)], []
    for folder in packed_and_dense(kind):
        target = cuda_target(locate_model(str(folder)), torch.bfloat16, num_slots=1)
        logits.append(target.logits(target.read(target.new_cache(100), rows)))
    assert torch.equal(*logits)
