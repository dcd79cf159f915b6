"""Gemma 4 gives transformers' texts, though its layers have heads of two widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.scheduler.runs.launch import slow_on_gpu
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.exactness.forward_comparisons import _our_logits
from swiftbatch.worker.forward.target_model import load_forwards
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE
from swiftbatch.worker.training.train_griffin import train_griffin
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.formats.twins import logits_of
from tests.worker.model.gemma4_configs import GEMMA4, write_gemma4
from tests.worker.model.kind_promises import check_config_is_refused, check_texts_are_those_of_transformers, loaded

pytestmark = [pytest.mark.long, needs_kernels]

DENSE, WITH_EXPERTS, SMALLEST = "Gemma 4 31B", "Gemma 4 26B A4B", "Gemma 4 E2B"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("model") for name in GEMMA4}
    for name, folder in found.items():
        write_gemma4(name, folder)
    return found


@pytest.mark.parametrize("name", GEMMA4)
def test_logits_and_greedy_texts_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    check_texts_are_those_of_transformers(loaded(folders[name], "float32"))


@pytest.mark.parametrize("name", GEMMA4)
def test_bf16_is_as_near_to_float32_as_in_transformers(name: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[name], "bfloat16")
    token_ids = [7 * each % target.vocab_size for each in range(150)]
    exact, theirs = (
        load_causal_lm(target.files, dtype)(input_ids=torch.tensor([token_ids])).logits[0].double()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = _our_logits(target, token_ids, target.new_cache(len(token_ids))).double()
    far, expected = ((each - exact).square().mean(-1).median() for each in (ours, theirs))
    assert far <= 1.1**2 * expected, "few rows meet other experts, which a median passes over"


def test_calls_over_some_layers_give_the_bits_of_one_call(folders: dict[str, Path]) -> None:
    """Later calls read keys of layers before them, and embed the tokens again."""
    target, text = loaded(folders[SMALLEST], "bfloat16"), [11 * each % 200 for each in range(100)]
    found = []
    for layers in ((), (0, 2, 5)):
        cache = target.new_cache(200)
        while cache.length < len(text):
            target.read(cache, text[cache.length :], layers)
        [outputs] = target.verify([tree_rows(cache, 5, DraftTree.chain([6, 7]))], layers)
        found.append(outputs.logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("part", ["embed_tokens_per_layer", "per_layer_model_projection", "layers.6.self_attn.q_proj"])
def test_each_part_of_a_small_model_changes_logits(part: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """So tests of logits would notice its absence."""
    tensors = load_file(folders[SMALLEST] / "model.safetensors")
    name = f"model.language_model.{part}.weight"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[SMALLEST] / "config.json").read_text())
    ours, theirs = (logits_of(loaded(folder, "float32")) for folder in (tmp_path, folders[SMALLEST]))
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_the_table_of_a_model_in_float32_stays_as_it_is_stored(folders: dict[str, Path]) -> None:
    """It has most of the weights of a small model."""
    dense = dense_weights(locate_model(str(folders[SMALLEST])), torch.float32)
    assert dense is not None
    assert isinstance(dense.ple_table, torch.Tensor)
    assert (dense.ple_table.dtype, dense.embedding.dtype) == (torch.bfloat16, torch.float32)


def test_a_gpu_runs_it_and_refuses_heads_of_other_widths_before_anything_is_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for folder in folders.values():
        found = inspect_model(str(folder))
        assert found.cuda is not None
        assert (found.cuda.name, bool(found.slots)) == ("kernels", True)
        assert slow_on_gpu(str(folder), 1) is None
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4[DENSE] | {"global_head_dim": 192}))
    assert inspect_model(str(tmp_path)).refusal is None
    files = ModelFiles("some-model", tmp_path, Digests({}, {}), 1024, 200)
    reason = r"it does not run on a GPU: .* found heads of 192 beside 64, expected twice as many"
    with pytest.raises(ModelError, match=rf"\Amodel .*: {reason}"):
        load_forwards(files, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ModelError, match=reason):
        slow_on_gpu(str(tmp_path), 1)


def test_what_reads_a_part_of_a_cache_is_refused_before_anything_is_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for engine in ("griffin", "tokenswift", "triforce"):
        with pytest.raises(ModelError, match=rf"\Aengine {engine}: .* layers with heads of different sizes in it; use"):
            check_parts(engine, str(folders[DENSE]), "", None)
    with pytest.raises(ModelError, match=r"engine griffin: its drafts read a part of the cache"):
        train_griffin(str(folders[DENSE]), tmp_path, tmp_path / "part", GRIFFIN_RECIPE, print)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"hidden_size_per_layer_input": 40}, "its hidden_size_per_layer_input is 40, no multiple of 16"),
        (
            {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 100},
            "its vocab_size_per_layer_input is 100",
        ),
        ({"num_kv_shared_layers": 3}, "its num_kv_shared_layers is 3, and no layer before these has their keys"),
        ({"num_kv_shared_layers": 9}, "its num_kv_shared_layers is 9, and no layer"),
        ({"num_kv_shared_layers": None}, "expected an integer from 0"),
        ({"num_kv_shared_layers": 2, "global_head_dim": 64, "num_global_key_value_heads": 4}, "heads of one size"),
        (
            {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": True},
            "its use_double_wide_mlp stands beside enable_moe_block",
        ),
        ({"use_bidirectional_attention": "all"}, "its use_bidirectional_attention is 'all'"),
        ({"global_head_dim": 96}, "found heads of 96 beside 64"),
        ({"num_global_key_value_heads": 3}, "found 4 heads for 3 of keys"),
        ({"layer_types": ["sliding_attention"] * 4}, "its last layer has a window"),
        ({"layer_types": None}, "its layer_types"),
        ({"rope_parameters": None}, "config.json has rope_parameters = None; expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_theta|factor|left to a default"),
        ({"router_shift": 2}, "router_shift, which may change a layer"),
        ({"per_layer_config": {"1": {"head_dim": 96}}}, "is left to a default"),
    ],
)
def test_other_forms_are_refused_in_a_line(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    check_config_is_refused(tmp_path, GEMMA4[DENSE] | said, reason)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"num_global_key_value_heads": 2}, r"found key of .*\[128, 128\].*, expected .*\[256, 128\]"),
        ({"vocab_size": 100}, r"found head of .*\[200, 128\].*, expected .*\[100, 128\]"),
        ({"intermediate_size": 48}, "found rows of mlp.gate_proj"),
        ({"attention_k_eq_v": False}, "its tensors are others, model.layers.1.self_attn.v_proj.weight among them"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_with_the_reason(
    said: dict[str, Any], reason: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_beside(folders[DENSE], tmp_path, said)
    with pytest.raises(
        ModelError, match=rf"\A.* do not take its weights: {reason}.*; check that its config\.json .*\Z"
    ):
        loaded(tmp_path, "bfloat16")


def test_inspect_of_a_model_that_runs_nowhere_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    write_beside(folders[DENSE], tmp_path, {"attention_k_eq_v": False})
    assert "model.layers.1.self_attn.v_proj.weight among them" in str(inspect_model(str(tmp_path)).refusal)


def test_a_config_is_read_as_newer_versions_write_it(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, published in GEMMA4.items():
        AutoConfig.for_model(**published).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert "global_head_dim" not in written
        (tmp_path / "config.json").write_text(json.dumps(published))
        before = inspect_model(str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert inspect_model(str(tmp_path)) == before, name


def write_beside(model: Path, folder: Path, said: dict[str, Any]) -> None:
    """Write another config beside a model's weights."""
    published = json.loads((model / "config.json").read_text())
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    text = published["text_config"] | said
    (folder / "config.json").write_text(json.dumps(published | {"text_config": text}))
