"""Models with latent attention through GPU forwards, also those whose rows attend to keys that an indexer chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import load_cuda_forwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS
from swiftbatch.worker.kernels.kernel_sizes import LATENT_BLOCKS, num_splits
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.session import session as worker_session
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import (
    CPU,
    check_attention_plan,
    check_drafts_beside_a_resumed_job,
    check_rows_of_two_trees,
    cuda_target,
    packed_and_dense,
)
from tests.worker.forward.cuda.test_pages_of_a_gpu import alone_on_a_cpu, check_jobs_that_outgrow_pages
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.formats.examples import EXAMPLES, Example, fp8
from tests.worker.model.formats.test_native_experts import stored
from tests.worker.model.latent_configs import WITH_INDEXERS, WITH_LATENTS
from tests.worker.session.recurrent_parts import save_recurrent_model

pytestmark = pytest.mark.long

TRIED = "DeepSeek R1"  # the others differ in data, one in queries without vectors
CHOOSING = "GLM 5.2"  # has layers that share the choice of others; rows of all models with indexers choose 20 keys
MODELS = WITH_LATENTS | WITH_INDEXERS
TEXT = [7 * each % 64 for each in range(70)]


def files_of(name: str, folder: Path) -> ModelFiles:
    write_experts(MODELS[name], folder)
    return locate_model(str(folder))


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [(TRIED, 40), (CHOOSING, 40), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in MODELS)],
)
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    target = cuda_target(files_of(name, tmp_path), torch.float32, 1, 250, "cublas")
    found = compare(target, num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows


def read(target: TargetModel, num_left: int = 0) -> torch.Tensor:
    """Return a text's logits, also after a restore of `num_left` positions."""
    cache, logits = target.new_cache(100), []
    for start in (0, num_left):
        left = TEXT[start:]
        while left:
            hidden = target.read(cache, left).clone()
            left = left[len(hidden) :]
        logits.append(target.logits(hidden[-1:]))
        kept = cache.kv(0, num_left).copy()
        cache.clear()
        cache.roll_back(0)
        cache.load(kept)
    assert torch.equal(*logits)
    return logits[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "num_numbers"), [("DeepSeek V2 Lite", 2 * (64 + 32)), (CHOOSING, 5 * (64 + 32 + 48))])
def test_a_text_goes_on_from_a_checkpoint_with_the_same_bits(name: str, num_numbers: int, tmp_path: Path) -> None:
    target = cuda_target(files_of(name, tmp_path), torch.float32, 1, linear="cublas")
    assert torch.equal(read(target, 66), read(target))
    assert target.cache_shape.bytes_per_position() == num_numbers * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        *(TRIED, "DeepSeek V3.2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("DeepSeek V2 Lite", CHOOSING)),
    ],
)
def test_rows_of_two_trees_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    check_rows_of_two_trees(cuda_target(files_of(name, tmp_path), torch.bfloat16), 4, TEXT[:64], TEXT[64:68])


@pytest.mark.slow  # rows of trees have those bits, as the test above shows
@pytest.mark.parametrize("name", ["GLM 4.7 Flash", "GLM 5"])
def test_drafts_beside_a_resumed_job_give_plain_decoding_s_tokens(name: str, tmp_path: Path) -> None:
    check_drafts_beside_a_resumed_job(cuda_target(files_of(name, tmp_path), torch.float32, linear="cublas"), 3)


@pytest.mark.parametrize(
    ("name", "example"),
    [
        *(pytest.param(name, fp8([128, 128]), id=f"{name}, blocks of FP8") for name in (TRIED, CHOOSING)),
        pytest.param(CHOOSING, EXAMPLES["ModelOpt NVFP4"], id="NVFP4", marks=pytest.mark.slow),
    ],
)
def test_packed_weights_take_what_the_plan_counts_and_give_their_twin_s_logits(
    name: str, example: Example, tmp_path: Path
) -> None:
    logits = []
    for files, stacked in packed_and_dense(example, tmp_path, *stored(name, tmp_path / "plain")):
        if name == TRIED:
            products = [each for layer in stacked.layers for each in layer.products]
        else:
            latents = [layer.latent for layer in stacked.layers if layer.latent is not None]
            products = [each.indexer.query for each in latents if each.indexer is not None]
            assert len(products) == 2
        is_packed = [isinstance(each.weight, PackedMatrix) for each in products]
        assert all(is_packed) == any(is_packed) == (not logits)
        target = cuda_target(files, torch.bfloat16, num_slots=1)
        logits.append(target.logits(target.read(target.new_cache(100), TEXT[:30])))
    assert torch.equal(*logits)


def test_a_plan_counts_one_vector_a_position(tmp_path: Path) -> None:
    sizes = read_sizes(files_of(TRIED, tmp_path), "bfloat16")
    assert sizes is not None
    assert sizes.bytes_per_position == sizes.kept_bytes_per_position == 2 * (64 + 32) * 2


def test_latent_vectors_have_no_codes_of_8_bits_on_a_gpu_either(tmp_path: Path) -> None:
    wanted = SlotsWanted(longest_job=100)
    with pytest.raises(ModelError, match="hold a latent vector per position"):
        load_cuda_forwards(files_of(TRIED, tmp_path), torch.bfloat16, CPU, wanted, frozenset(), DEFAULT_KERNELS, "int8")


def test_a_plan_counts_scores_lists_and_partial_sums_over_chosen_keys(tmp_path: Path) -> None:
    files = files_of(CHOOSING, tmp_path)
    decoder = check_attention_plan(cuda_target(files, torch.float32, 1, 250), "indexer")
    assert len(decoder.attention.scratch.output) == 1 < num_splits(decoder.layout.capacity, LATENT_BLOCKS)


@pytest.mark.slow
def test_a_draft_model_beside_its_target_chooses_in_caches_without_pages(tmp_path: Path) -> None:
    target = cuda_target(files_of(CHOOSING, tmp_path), torch.float32, linear="cublas")
    beside, logits = target.load_beside(target.files, 100), []
    assert isinstance(beside.forwards, CudaForwards)
    for each in (target, beside):
        first, cache = each.new_cache(90), each.new_cache(90)
        assert first.slot != cache.slot
        logits.append(each.logits(each.read(cache, TEXT[:40])))
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "said"), [("glm4_moe_lite", {}), ("glm_moe_dsa", {"index_topk": 20})])
def test_jobs_that_outgrow_the_pages_and_come_back_have_the_tokens_of_plain_decoding(
    kind: str, said: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "step_costs_of", lambda target: free_rows)
    model = save_recurrent_model(tmp_path / "model", kind, **said)
    expected = alone_on_a_cpu(tmp_path / "alone", model)
    check_jobs_that_outgrow_pages(tmp_path / "paged", model, expected, "token-recycling", monkeypatch)
