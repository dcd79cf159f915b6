"""MiMo-V2-Flash gives transformers' texts, though its values are narrower than its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kv.kv_capacity import bytes_per_position, held_of
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.model_files import locate_model, read_config
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kv.window_parts import spoil_what_is_forgotten
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import logits_of, make_twins
from tests.worker.model.kind_promises import (
    NUM_RECOVERED,
    check_texts_are_those_of_transformers,
    decode,
    loaded,
    sequences,
)
from tests.worker.model.mimo_configs import MIMO, MIMO_STRIPES, write_mimo

pytestmark = [pytest.mark.long, needs_kernels]

ENGINES = ("auto", "token-recycling", "prompt-lookup", "suffix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_mimo(found)
    return found


def test_logits_and_greedy_texts_are_those_of_transformers(folder: Path) -> None:
    target = loaded(folder, "float32")
    kinds = load_causal_lm(target.files, torch.float32).config.layer_types
    assert [each == "sliding_attention" for each in kinds] == list(map(bool, MIMO["hybrid_layer_pattern"]))
    check_texts_are_those_of_transformers(target)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_thousands_of_rows_of_trees_are_exact(kv_dtype: KVDtype | None, folder: Path) -> None:
    target = TargetModel.load(locate_model(str(folder)), "bfloat16", "cpu", kv_dtype=kv_dtype)
    num_rows = 2000 if kv_dtype is None else 500
    assert probe_rows(target, num_rows=num_rows, seed=4, first_length=20).num_differing == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_codes_of_8_bits_shift_logits_little(kv_dtype: KVDtype, folder: Path) -> None:
    found = compare(TargetModel.load(locate_model(str(folder)), "bfloat16", "cpu", kv_dtype=kv_dtype))
    assert found.agrees
    assert found.kept is not None
    assert 0 < found.kept.shift < 1


def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(folder: Path) -> None:
    target = loaded(folder, "bfloat16")
    plain = [decode(target, "autoregressive", [text])[0] for text in sequences(target)]
    for engine in ENGINES:
        fresh, resumed = sequences(target)
        resumed.extend(plain[1][:NUM_RECOVERED])
        assert decode(target, engine, [fresh, resumed]) == plain, engine


def test_what_a_checkpoint_holds_and_what_was_forgotten_gives_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten numbers are NaN and would spread."""
    spoil_what_is_forgotten(monkeypatch)
    target = loaded(folder, "bfloat16")
    token_ids = [11 * each % target.vocab_size for each in range(600)]
    forgetting, whole, resumed = (target.new_cache(700, forgets=forgets) for forgets in (True, False, False))
    for cache in (forgetting, whole):
        while cache.length < len(token_ids):
            target.read(cache, token_ids[cache.length :])
    kv = whole.kv(0, len(token_ids))
    assert kv.nbytes == len(token_ids) * target.cache_shape.bytes_per_position()
    resumed.load(kv)
    tree = DraftTree.chain(token_ids[:3])
    logits = [target.verify([tree_rows(cache, 7, tree)])[0].logits for cache in (forgetting, whole, resumed)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_caches_take_what_each_layer_has_and_plans_count_it(folder: Path) -> None:
    target, config = loaded(folder, "bfloat16"), read_config("", folder)
    shape = target.cache_shape
    assert shape.stripes == MIMO_STRIPES
    assert bytes_per_position(config, "bfloat16") == shape.bytes_per_position() == 2 * 2 * 96 * sum(MIMO_STRIPES)
    held = held_of(config)
    assert held == shape.held_positions()
    assert held is not None
    assert held.share == 2 / sum(MIMO_STRIPES)
    found = inspect_model(str(folder))
    assert (found.refusal, found.bytes_per_position) == (None, shape.bytes_per_position())
    assert measure_step_costs(target) is not None


@pytest.mark.parametrize("example", ["fp8 in blocks of 128", "ModelOpt NVFP4"])
def test_packed_weights_give_the_bits_of_their_dequantized_twin(example: str, folder: Path, tmp_path: Path) -> None:
    tensors = {
        name: each for name, each in load_file(folder / "model.safetensors").items() if not name.startswith("model.mtp")
    }
    packed, dense = make_twins(EXAMPLES[example], tmp_path, MIMO, tensors)
    assert inspect_model(str(packed)).refusal is None
    ours, theirs = (logits_of(loaded(each, "bfloat16")) for each in (packed, dense))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("part", ["1.self_attn.attention_sink_bias", "6.self_attn.v_proj.weight"])
def test_sinks_and_values_change_logits(part: str, folder: Path, tmp_path: Path) -> None:
    """So tests of logits would notice their absence."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{part}"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    ours, theirs = (logits_of(loaded(each, "float32")) for each in (tmp_path, folder))
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_a_gpu_runs_it(folder: Path) -> None:
    found = inspect_model(str(folder))
    assert found.cuda is not None
    assert (found.cuda.name, bool(found.slots)) == ("kernels", True)


def test_what_reads_a_part_of_a_cache_is_refused(folder: Path, tmp_path: Path) -> None:
    target = loaded(folder, "bfloat16")
    with pytest.raises(ModelError, match="layers with heads of different sizes"):
        create_drafter("griffin", target, measure_step_costs(target))
    with pytest.raises(ModelError, match=r"--kv-offload: .* heads of different sizes"):
        loaded(folder, "bfloat16", str(tmp_path))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"add_swa_attention_sink_bias": False}, "its add_swa_attention_sink_bias is False"),
        ({"add_full_attention_sink_bias": True}, "its add_full_attention_sink_bias is True"),
        ({"swa_num_key_value_heads": 1}, "its swa_num_key_value_heads is 1, and 2 is expected"),
        ({"swa_head_dim": 64}, "its swa_head_dim is 64, and 96 is expected"),
        ({"swa_num_attention_heads": 8}, "its swa_num_attention_heads is 8"),
        ({"v_head_dim": 112, "swa_v_head_dim": 112}, "its v_head_dim is 112, beside heads of 96"),
        ({"scoring_func": "softmax"}, "its scoring_func is 'softmax'"),
        ({"n_shared_experts": 1}, "its n_shared_experts is 1"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types = .*; expected a list of 7"),
        ({"hybrid_layer_pattern": [2] * 7}, "layer_types"),
        ({"hybrid_layer_pattern": 2}, "hybrid_layer_pattern"),
        ({"layer_types": ["full_attention"] * 7}, "hybrid_layer_pattern, which may change a layer"),
        ({"attention_value_scale": None}, "attention_value_scale = None; expected a finite number"),
        ({"sliding_window_size": "40"}, "sliding_window = '40'"),
        ({"value_shift": 2}, "value_shift, which may change a layer"),
    ],
)
def test_other_forms_are_refused_in_a_line(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO | said))
    with pytest.raises(ModelError, match=reason) as caught:
        locate_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_config_is_read_as_its_class_writes_it(folder: Path, tmp_path: Path) -> None:
    written = AutoConfig.for_model(**MIMO)
    written.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert compare(loaded(tmp_path, "float32")).agrees
