"""Models whose rows attend to keys that an indexer chooses, through GPU forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.kernel_sizes import LATENT_BLOCKS, num_splits
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.session import session as worker_session
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import (
    check_drafts_beside_a_resumed_job,
    check_rows_of_two_trees,
    cuda_target,
)
from tests.worker.forward.cuda.test_cuda_latents import CPU, TEXT, read
from tests.worker.forward.cuda.test_pages_of_a_gpu import alone_on_a_cpu, check_jobs_that_outgrow_pages
from tests.worker.kv.memory.test_packed_sizes import loaded_bytes
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.formats.examples import EXAMPLES, Example, fp8
from tests.worker.model.formats.test_native_experts import stored
from tests.worker.model.formats.twins import make_twins
from tests.worker.model.latent_configs import WITH_INDEXERS
from tests.worker.session.recurrent_parts import save_recurrent_model

pytestmark = pytest.mark.long

TRIED = "GLM 5.2"  # has layers that share the choice of others


def files_of(name: str, folder: Path) -> ModelFiles:
    """Their rows choose 20 keys."""
    write_experts(WITH_INDEXERS[name], folder)
    return locate_model(str(folder))


@pytest.mark.parametrize(
    ("name", "num_rows"), [(TRIED, 40), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in WITH_INDEXERS)]
)
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    target = cuda_target(files_of(name, tmp_path), torch.float32, 1, 250, "cublas")
    found = compare(target, num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows


def test_a_text_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    target = cuda_target(files_of(TRIED, tmp_path), torch.float32, 1, linear="cublas")
    assert torch.equal(read(target, 66), read(target))
    assert target.cache_shape.bytes_per_position() == 5 * (64 + 32 + 48) * 4


@pytest.mark.parametrize("name", ["DeepSeek V3.2", pytest.param(TRIED, marks=pytest.mark.slow)])
def test_rows_of_two_trees_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    check_rows_of_two_trees(cuda_target(files_of(name, tmp_path), torch.bfloat16), 4, TEXT[:64], TEXT[64:68])


@pytest.mark.slow  # rows of trees have those bits, as the test above shows
def test_drafts_beside_a_resumed_job_give_plain_decoding_s_tokens(tmp_path: Path) -> None:
    check_drafts_beside_a_resumed_job(cuda_target(files_of("GLM 5", tmp_path), torch.float32, linear="cublas"), 3)


def test_a_plan_counts_scores_lists_and_partial_sums_over_chosen_keys(tmp_path: Path) -> None:
    files = files_of(TRIED, tmp_path)
    target, sizes = cuda_target(files, torch.float32, 1, 250), read_sizes(files, "float32")
    assert isinstance(target.forwards, CudaForwards)
    assert sizes is not None
    decoder = target.forwards._decoder
    scratch = decoder.attention.scratch  # type: ignore[attr-defined]
    numbers = [each for each in vars(decoder._layers.indexer).values() if isinstance(each, torch.Tensor)]
    taken = sum(each.nbytes for each in (*numbers, scratch.output, scratch.lse))
    assert taken == GPUMemory(0).attention_bytes(sizes, decoder.layout.capacity).once
    assert len(scratch.output) == 1 < num_splits(decoder.layout.capacity, LATENT_BLOCKS)


@pytest.mark.slow
def test_a_draft_model_beside_its_target_chooses_in_caches_without_pages(tmp_path: Path) -> None:
    target = cuda_target(files_of(TRIED, tmp_path), torch.float32, linear="cublas")
    beside, logits = target.load_beside(target.files, 100), []
    assert isinstance(beside.forwards, CudaForwards)
    for each in (target, beside):
        first, cache = each.new_cache(90), each.new_cache(90)
        assert first.slot != cache.slot
        logits.append(each.logits(each.read(cache, TEXT[:40])))
    assert torch.equal(*logits)


@pytest.mark.slow
def test_jobs_that_outgrow_the_pages_and_come_back_have_the_tokens_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "step_costs_of", lambda target: free_rows)
    model = save_recurrent_model(tmp_path / "model", "glm_moe_dsa", index_topk=20)
    expected = alone_on_a_cpu(tmp_path / "alone", model)
    check_jobs_that_outgrow_pages(tmp_path / "paged", model, expected, "token-recycling", monkeypatch)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(fp8([128, 128]), id="blocks of FP8"),
        pytest.param(EXAMPLES["ModelOpt NVFP4"], id="NVFP4", marks=pytest.mark.slow),
    ],
)
def test_packed_weights_take_what_the_plan_counts_and_give_their_twin_s_logits(
    example: Example, tmp_path: Path
) -> None:
    logits = []
    for folder in make_twins(example, tmp_path, *stored(TRIED, tmp_path / "plain")):
        files = locate_model(str(folder))
        weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
        assert weights is not None
        assert sizes is not None
        stacked = stacked_weights(weights, CPU)
        assert sizes.weight_bytes == loaded_bytes(stacked)
        latents = [layer.latent for layer in stacked.layers if layer.latent is not None]
        indexers = [each.indexer for each in latents if each.indexer is not None]
        assert len(indexers) == 2
        assert all(isinstance(each.query.weight, PackedMatrix) == (not logits) for each in indexers)
        target = cuda_target(files, torch.bfloat16, num_slots=1)
        logits.append(target.logits(target.read(target.new_cache(100), TEXT[:30])))
    assert torch.equal(*logits)
