"""MiniMax M3 gives transformers' texts, and its rows attend to blocks of keys that an indexer chooses."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.text_config import text_view
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.text.tokenizer_loading import loaded_tokenizer
from swiftbatch.worker.training.train_target import train_tokenizer
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.formats.twins import logits_of
from tests.worker.model.kind_promises import check_config_is_refused, check_texts_are_those_of_transformers, loaded
from tests.worker.model.minimax_config import PUBLISHED, write_m3

pytestmark = [pytest.mark.long, needs_kernels]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_m3(tmp_path_factory.mktemp("model"))


def of_choice(**said: Any) -> dict[str, Any]:
    return {"sparse_attention_config": PUBLISHED["sparse_attention_config"] | said}


def text_of(target: TargetModel, length: int = 700) -> list[int]:
    return torch.randint(3, target.vocab_size, (length,), generator=torch.Generator().manual_seed(8)).tolist()


def test_logits_and_greedy_texts_are_those_of_transformers(folder: Path) -> None:
    check_texts_are_those_of_transformers(loaded(folder, "float32"))


@pytest.mark.parametrize("said", [{}, {"sparse_block_size": 128, "sparse_topk_blocks": 2}])
def test_all_choices_in_a_long_text_are_those_of_transformers(
    said: dict[str, int], folder: Path, tmp_path: Path
) -> None:
    """Rows from position 192 or 256 on do not see all blocks, and those of other choices get other logits."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | of_choice(**said)))
    target = loaded(tmp_path, "float32")
    text = text_of(target)
    ours, theirs = logits_of(target, text), target.model(input_ids=torch.tensor([text])).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-3)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_a_choice_is_the_same_whichever_rows_and_layers_are_read_together(folder: Path) -> None:
    target = loaded(folder, "bfloat16")
    text, found = text_of(target, 400), []
    for size, layers in ((400, ()), (64, ()), (7, ()), (50, (0, 2, 3))):
        cache = target.new_cache(500)
        while cache.length < len(text):
            target.read(cache, text[cache.length : cache.length + size], layers)
        [outputs] = target.verify([tree_rows(cache, 5, DraftTree.chain([6, 7]))], layers)
        found.append(outputs.logits)
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("said", [{"sparse_topk_blocks": 2}, {"sparse_topk_blocks": 8}])
def test_choices_decide_what_rows_see(said: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """So tests of logits would notice another choice. Up to the number of chosen keys, rows see all."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | of_choice(**said)))
    found = []
    for each in (folder, tmp_path):
        target = loaded(each, "float32")
        text = text_of(target, 300)
        found.append(logits_of(target, text))
    differs = (found[0] != found[1]).any(dim=1)
    first = 64 * min(3, said["sparse_topk_blocks"])
    assert not differs[:first].any()
    assert differs[first:].float().mean() > 0.9


@pytest.mark.parametrize("part", ["index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm"])
def test_a_damaged_indexer_is_refused_though_logits_are_finite(part: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.3.self_attn.{part}.weight"
    tensors[name].view(-1)[-1] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"numbers in {name} that are not finite"):
        loaded(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (of_choice(sparse_score_type="mean"), "sparse_attention_config is {'sparse_score_type': 'mean'}"),
        (of_choice(sparse_init_block=1), "sparse_attention_config is {'sparse_init_block': 1}"),
        (of_choice(use_sparse_attention=False), "sparse_attention_config is {'use_sparse_attention': False}"),
        (of_choice(sparse_disable_index_value=[0] * 5), "sparse_disable_index_value"),
        (of_choice(sparse_shift=1), "sparse_attention_config is {'sparse_shift': 1}"),
        (of_choice(sparse_local_block=2), "its index_local_blocks is 2, and 1 is expected"),
        (of_choice(sparse_num_index_heads=1), "its index_n_heads is 1, and 2 is expected"),
        (of_choice(sparse_index_dim=32), "its index_head_dim is 32, and 64 is expected"),
        (of_choice(sparse_block_size=100), "expected blocks of a multiple of 64 keys"),
        (
            of_choice(sparse_attention_freq=[0] * 5, sparse_disable_index_value=[0] * 5),
            "none of its layers is minimax_m3_sparse",
        ),
        (
            of_choice(sparse_attention_freq=[0, 1], sparse_disable_index_value=[0, 1]),
            "layer_types = .*; expected a list of 5",
        ),
        ({"sparse_attention_config": 3}, "sparse_attention_config is 3"),
        ({"moe_layer_freq": [1, 0, 1, 1, 1]}, "first_k_dense_replace, which may change a layer"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace, which may change a layer"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size, which may change a layer"),
        ({"rotary_dim": 64}, "rotary_dim, which may change a layer"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ({"swiglu_limit": None}, "swiglu_limit = None; expected a finite number"),
        ({"use_gemma_norm": False}, "its use_gemma_norm is False"),
        ({"attention_output_gate": True}, "its attention_output_gate is True"),
        ({"n_shared_experts": 2}, "its n_shared_experts is 2"),
        ({"qk_norm_type": "per_layer"}, "its qk_norm_type is 'per_layer'"),
        ({"value_shift": 2}, "value_shift, which may change a layer"),
    ],
)
def test_other_forms_are_refused_in_a_line(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    check_config_is_refused(tmp_path, PUBLISHED | said, reason)


def test_the_whole_model_and_the_config_of_its_class_are_read_as_well(folder: Path, tmp_path: Path) -> None:
    nested, written = tmp_path / "nested", tmp_path / "written"
    AutoConfig.for_model(**text_view(PUBLISHED), rotary_dim=32).save_pretrained(written)
    (written / "model.safetensors").symlink_to(folder / "model.safetensors")
    tensors = {f"language_model.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.vision_model.pre_layrnorm.weight"] = torch.ones(8)
    tensors["patch_merge_mlp.linear_1.weight"] = torch.ones(8, 8)
    nested.mkdir()
    save_file(tensors, nested / "model.safetensors", metadata={"format": "pt"})
    (nested / "config.json").write_text(json.dumps({"model_type": "minimax_m3_vl", "text_config": PUBLISHED}))
    expected = logits_of(loaded(folder, "float32"))
    assert all(torch.equal(logits_of(loaded(each, "float32")), expected) for each in (nested, written))


def test_its_tokenizer_loads_without_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoTokenizer knows no class of its config."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    train_tokenizer(["the quick brown fox " * 20], 270).save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert loaded_tokenizer(locate_model(str(tmp_path))).encode("the fox")
    assert not caplog.records
