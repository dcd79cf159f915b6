"""Rows in a GPU's forwards meet their own LoRA adapter alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import known_rows, tree_rows
from swiftbatch.worker.kernels.cuda.lora_kernels import adapter_bytes
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights, with_adapters
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.lora import LoraFiles
from swiftbatch.worker.model.lora_weights import adapter_weights
from swiftbatch.worker.model.model_files import locate_model, read_config
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.engine.prefix_parts import decode, new_engine, sequence
from tests.worker.forward.cuda.cuda_parts import CPU, cuda_target
from tests.worker.model.lora_parts import located, write_adapter

pytestmark = pytest.mark.long

NAMES, PROMPT = (None, "all", "few"), [7, 9, 30, 12, 8, 41]
TREE = DraftTree([5, 9, 2], [-1, 0, 0])


@pytest.fixture(scope="module")
def loras(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoraFiles]:
    folder = tmp_path_factory.mktemp("adapters")
    few = write_adapter(folder / "few", one_layer_model, 2, ("k_proj", "up_proj", "down_proj"), rank=24)
    return located(all=write_adapter(folder / "all", one_layer_model), few=few)


def logits(target: TargetModel, names: tuple[str | None, ...]) -> list[torch.Tensor]:
    caches = [target.new_cache(100, lora=name) for name in names]
    for cache in caches:
        target.read(cache, PROMPT)
    found = [each.logits.clone() for each in target.verify([tree_rows(cache, 4, TREE) for cache in caches])]
    for cache in caches:
        cache.clear()
    return found


@pytest.mark.parametrize(
    ("linear", "dtype"),
    [("triton", torch.bfloat16), ("triton", torch.float32), ("cublas", torch.float32)],  # the CPU's has no bf16
)
def test_rows_of_two_adapters_and_of_none_have_the_bits_that_they_have_alone(
    linear: LinearName, dtype: torch.dtype, one_layer_model: Path, loras: list[LoraFiles]
) -> None:
    files = locate_model(str(one_layer_model))
    target = cuda_target(files, dtype, 5, linear=linear, loras=loras)
    alone = {name: logits(target, (name,))[0] for name in NAMES}
    assert not alone["all"].equal(alone["few"])
    assert not alone["all"].equal(alone[None])
    assert logits(cuda_target(files, dtype, 5, linear=linear), (None,))[0].equal(alone[None])
    names = ("few", None, "all", "all", "few")
    for name, found in zip(names, logits(target, names), strict=True):
        assert found.equal(alone[name])


def test_logits_are_those_of_the_kernels_for_cpus(one_layer_model: Path, loras: list[LoraFiles]) -> None:
    files = locate_model(str(one_layer_model))
    ours, cpu = cuda_target(files, torch.float32, loras=loras), TargetModel.load(files, "float32", "cpu", loras=loras)
    for name in NAMES:
        found, expected = (
            target.verify(known_rows(target.new_cache(100, lora=name), [*PROMPT, 3, 17, 20, 6])).logits.together
            for target in (ours, cpu)
        )
        assert found.allclose(expected, atol=1e-4)
        assert found.argmax(1).equal(expected.argmax(1))


def test_drafts_change_no_token_of_any_adapter(one_layer_model: Path, loras: list[LoraFiles]) -> None:
    target = cuda_target(locate_model(str(one_layer_model)), torch.float32, 3, loras=loras)

    def named(name: str | None) -> Sequence:
        made = sequence(target, str(name), PROMPT, 6)
        made.lora = name
        return made

    plain = [decode(new_engine(target), [named(name)])[0].sequence.output_ids.tolist() for name in NAMES]
    batch = [named(name) for name in NAMES]
    decode(new_engine(target, "token-recycling"), batch)
    assert [each.output_ids.tolist() for each in batch] == plain


def test_the_memory_plan_knows_what_adapters_take(one_layer_model: Path, loras: list[LoraFiles]) -> None:
    files = locate_model(str(one_layer_model))
    adapters = [adapter_weights(each, read_config(files.name, files.path)) for each in loras]
    weights = dense_weights(files, torch.float32)
    assert weights is not None
    stacked = with_adapters(stacked_weights(weights, CPU), adapters)
    products = [each for layer in stacked.layers for each in layer.adapters.values()]
    assert sum(each.down.nbytes + each.up.nbytes for each in products) == adapter_bytes(adapters) > 0
