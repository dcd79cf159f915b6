"""Gemma 4 and MiMo-V2-Flash, some of whose layers have heads of their own, through GPU forwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.cuda.cuda_loading import arena_of, cuda_cache_shape
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import chain_rows, tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, plan_pages
from swiftbatch.worker.kv.kv_capacity import HeldPositions, WindowPages, held_in_windows
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
from tests.worker.model.gemma4_configs import GEMMA4, STRIPES, write_gemma4
from tests.worker.model.mimo_configs import MIMO, MIMO_STRIPES, write_mimo

pytestmark = pytest.mark.long

DENSE, WITH_EXPERTS, SMALLEST, NARROW = "Gemma 4 31B", "Gemma 4 26B A4B", "Gemma 4 E2B", "MiMo-V2-Flash"
CONFIGS = GEMMA4 | {NARROW: MIMO}
BESIDE = ("model.embed_vision.", "model.mtp.")
OWN_STRIPES = STRIPES | {NARROW: MIMO_STRIPES}
SLOW = pytest.mark.slow
EACH = pytest.mark.parametrize("name", CONFIGS)
TEXT = [7 * each % 200 for each in range(232)]
TREE = DraftTree([9, 8, 7, 6, 5, 4, 3], [-1, 0, 0, 1, 3, 4, 4])


def files_of(name: str, folder: Path) -> ModelFiles:
    if name == NARROW:
        write_mimo(folder)
    else:
        write_gemma4(name, folder)
    return locate_model(str(folder))


def read_to(target: TargetModel, cache: Any, end: int) -> None:
    while cache.length < end:
        target.read(cache, TEXT[cache.length : end])


@pytest.mark.parametrize("num_rows", [40, pytest.param(200, marks=SLOW)])
@EACH
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    found = compare(cuda_target(files_of(name, tmp_path), torch.float32, 1, 250, "cublas"), num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows


@pytest.mark.parametrize("name", [DENSE, SMALLEST, NARROW])
def test_the_doctor_s_model_gives_the_same_choices(name: str, tmp_path: Path) -> None:
    parts = Parts.of(files_of(name, tmp_path), "float32", torch.device("cpu"))
    assert parts.loaded is not None
    target = parts.target(1, 250)
    assert target.cache_shape.stripes == OWN_STRIPES[name]
    assert compare(target, 20).agrees


@pytest.mark.sample(3)
@EACH
def test_each_layer_s_output_is_that_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Layers are scaled at their ends, and rows see a prefix."""
    files = files_of(name, tmp_path)
    targets = cuda_target(files, torch.float32, 1, linear="cublas"), TargetModel.load(files, "float32", "cpu")
    caches = [target.new_cache(100) for target in targets]
    for target, cache in zip(targets, caches, strict=True):
        read_to(target, cache, 70)
    found, expected = (
        target.forwards.run([chain_rows(cache, TEXT[:5])], (0, 1, 2, 3))[0]
        for target, cache in zip(targets, caches, strict=True)
    )
    assert found.shape == expected.shape == (5, 4 * 128)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [DENSE, WITH_EXPERTS, SMALLEST, NARROW])
def test_rows_of_two_trees_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    check_rows_of_two_trees(cuda_target(files_of(name, tmp_path), torch.bfloat16), 4, TEXT[:64], TEXT[64:70])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        (WITH_EXPERTS, None),
        (DENSE, "int8"),
        pytest.param(DENSE, "fp8", marks=SLOW),
        pytest.param(NARROW, "fp8", marks=SLOW),
        pytest.param(NARROW, None, marks=SLOW),
        pytest.param(DENSE, None, marks=SLOW),
        pytest.param(SMALLEST, None, marks=SLOW),
        pytest.param(SMALLEST, "fp8", marks=SLOW),
    ],
)
def test_rows_have_the_bits_of_caches_that_forget_nothing(name: str, kv_dtype: KVDtype | None, tmp_path: Path) -> None:
    """Both pools count heads of their own layers."""
    files, windows = files_of(name, tmp_path), WindowPages(14, HeldPositions(240, 0.0))
    kept: dict[str, Any] = {"longest_job": 300, "linear": "cublas", "kv_dtype": kv_dtype}
    plain = cuda_target(files, torch.float32, **kept)
    target = cuda_target(files, torch.float32, windows=windows, **kept)
    theirs, ours = plain.new_cache(300), target.new_cache(300)
    for end in (170, 232):
        for each, cache in ((plain, theirs), (target, ours)):
            read_to(each, cache, end)
        expected, found = (
            each.verify([tree_rows(cache, 7, TREE)])[0] for each, cache in ((plain, theirs), (target, ours))
        )
        assert found.logits.isfinite().all()
        assert found.logits.equal(expected.logits)
        for cache in (ours, theirs):
            cache.commit([0, 2])
            cache.roll_back(end)
    assert (ours.kv(3 * PAGE, ours.length) == theirs.kv(3 * PAGE, ours.length)).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "has_windows"), [(DENSE, False), (DENSE, True), (SMALLEST, True), (NARROW, True)])
def test_a_checkpoint_is_that_of_a_cpu_and_gives_the_same_bits(name: str, has_windows: bool, tmp_path: Path) -> None:
    files = files_of(name, tmp_path)
    windows = WindowPages(14, HeldPositions(240, 0.0)) if has_windows else None
    target, native = cuda_target(files, torch.bfloat16, windows=windows), TargetModel.load(files, "bfloat16", "cpu")
    first, second, third = target.new_cache(200), target.new_cache(200), native.new_cache(200)
    first.retain(0)
    for each, cache in ((target, first), (native, third)):
        read_to(each, cache, 130)
    kv, expected = (cache.kv(0, 130) for cache in (first, third))
    assert kv.shape == expected.shape
    assert kv.dtype == expected.dtype
    found, wanted = (torch.from_numpy(each.view("int16")).view(torch.bfloat16).float() for each in (kv, expected))
    assert torch.equal(found.any(1), wanted.any(1)), "zeros fill the rows of narrow values"
    far = (found - wanted).square().mean((1, 2)) / wanted.square().mean((1, 2))
    assert far.max() < 1e-2, "each row of the checkpoint is the same layer's and head's"
    second.load(kv)
    ours, loaded = (target.verify([tree_rows(cache, 7, TREE)])[0].logits.clone() for cache in (first, second))
    assert torch.equal(ours, loaded)


@SLOW  # rows of trees have those bits, as a test above shows
@pytest.mark.parametrize("name", [WITH_EXPERTS, SMALLEST, NARROW])
def test_drafts_beside_a_resumed_job_give_plain_decoding_s_tokens(name: str, tmp_path: Path) -> None:
    check_drafts_beside_a_resumed_job(cuda_target(files_of(name, tmp_path), torch.bfloat16), 4)


@pytest.mark.parametrize(
    "name", [DENSE, *(pytest.param(each, marks=SLOW) for each in (WITH_EXPERTS, SMALLEST, NARROW))]
)
def test_a_row_has_the_same_bits_in_forwards_of_every_number_of_rows(name: str, tmp_path: Path) -> None:
    files = files_of(name, tmp_path)
    targets = [cuda_target(files, torch.bfloat16, num_rows=num_rows) for num_rows in (64, 128)]
    assert targets[1].forwards.narrow_rows == (64,)
    logits = []
    for target, num_nodes in ((targets[0], 20), (targets[1], 90), (targets[1], 20)):
        cache = target.new_cache(200)
        read_to(target, cache, 70)
        tree = DraftTree([each % 200 for each in range(num_nodes)], [each // 4 - 1 for each in range(num_nodes)])
        logits.append(target.verify([tree_rows(cache, 7, tree)])[0].logits[:21].clone())
    assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [DENSE, WITH_EXPERTS, SMALLEST, NARROW])
def test_packed_weights_give_their_twins_logits_and_take_what_a_plan_counts(name: str, tmp_path: Path) -> None:
    files_of(name, tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    tensors = {part.replace("language_model.", ""): stored[part] for part in stored if not part.startswith(BESIDE)}
    logits = []
    for folder in make_twins(EXAMPLES["ModelOpt NVFP4"], tmp_path, CONFIGS[name], tensors):
        files = locate_model(str(folder))
        target = cuda_target(files, torch.bfloat16, num_slots=1)
        logits.append(target.logits(target.read(target.new_cache(100), TEXT[:7])))
        weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
        assert weights is not None
        assert sizes is not None
        stacked = stacked_weights(weights, torch.device("cpu"))
        assert stacked.is_packed == (len(logits) == 1)
        scales = 2 * sum(layer.layer_scale is not None for layer in weights.layers)  # these are no tensors on a GPU
        assert sizes.weight_bytes == loaded_bytes(stacked) + scales
    assert torch.equal(*logits)


def test_a_plan_counts_the_table_of_a_run_in_float32_as_it_is_stored(tmp_path: Path) -> None:
    files = files_of(SMALLEST, tmp_path)
    weights, sizes = dense_weights(files, torch.float32), read_sizes(files, "float32")
    assert weights is not None
    assert sizes is not None
    stacked = stacked_weights(weights, torch.device("cpu"))
    assert stacked.ple is not None
    assert stacked.ple.table.dtype == torch.bfloat16
    assert sizes.weight_bytes == loaded_bytes(stacked) + 4 * len(weights.layers)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@EACH
def test_pools_and_partial_sums_take_what_a_plan_counts(name: str, kv_dtype: KVDtype | None, tmp_path: Path) -> None:
    files, longest_job = files_of(name, tmp_path), 3000
    weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
    assert weights is not None
    assert sizes is not None
    sizes = replace(sizes, kv_dtype=kv_dtype, held=held_in_windows(sizes.windows, 100))
    plan = plan_pages(sizes, GPUMemory(10**9), longest_job, 2)
    arena = arena_of(cuda_cache_shape(weights, torch.device("cpu"), kv_dtype, True), plan, None)
    assert plan.windows is not None
    assert arena.windowed is not None
    assert arena.buffer.nbytes == plan.num_pages * plan.page_bytes > 0
    assert arena.windowed.buffer.nbytes == plan.windows.num_pages * plan.window_page_bytes > 0
    counts = zip(OWN_STRIPES[name], sizes.windows, strict=True)
    num_windowed, num_all = sum(count for count, window in counts if window), sum(OWN_STRIPES[name])
    pages = arena.buffer.nbytes // plan.num_pages, arena.windowed.buffer.nbytes // plan.windows.num_pages
    assert pages[1] * num_all == sum(pages) * num_windowed
    layers = cuda_target(files, torch.bfloat16, 1, longest_job).forwards._decoder._layers
    assert layers.own is not None
    needed = GPUMemory(0).sum_bytes(sizes, arena.capacity).once
    assert layers.own.scratch.output.nbytes + layers.own.scratch.lse.nbytes == needed
    assert layers.attention.scratch.output.data_ptr() == layers.own.scratch.output.data_ptr(), "layers run in turn"
