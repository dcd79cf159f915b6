"""Models with experts in our kernels give transformers' texts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.kv_capacity import bytes_per_position
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.text_config import text_view
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.expert_configs import WITH_EXPERTS, write_experts
from tests.worker.model.kind_promises import (
    check_a_disk_changes_no_text,
    check_engines_give_plain_tokens_beside_a_resumed_job,
    check_texts_are_those_of_transformers,
    loaded,
    save_parts,
)
from tests.worker.model.latent_configs import WITH_INDEXERS, WITH_LATENTS

pytestmark = [pytest.mark.long, needs_kernels]

CONFIGS = WITH_EXPERTS | WITH_LATENTS | WITH_INDEXERS
DECODED = ("Qwen3 30B A3B", "gpt-oss 120B", "GLM 4.5", "GLM 4.7 Flash", "DeepSeek V3.2", "GLM 5.2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models whose rows meet different experts."""
    found = {}
    for name, published in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp("model")
        write_experts(published, found[name])
    return found


@pytest.fixture(scope="module")
def with_parts(folders: dict[str, Path]) -> dict[str, Path]:
    for name in DECODED:
        save_parts(folders[name], AutoConfig.for_model(**CONFIGS[name]))
    return folders


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_texts_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    check_texts_are_those_of_transformers(loaded(folders[name], "float32"))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_forward_is_that_of_transformers_whatever_its_caches_round(
    kv_dtype: KVDtype, folders: dict[str, Path]
) -> None:
    """Rows whose experts nearly tie may meet others."""
    files = locate_model(str(folders["Mixtral 8x7B"]))
    found = compare(TargetModel.load(files, "bfloat16", "cpu", kv_dtype=kv_dtype))
    assert found.agrees
    assert found.kept is not None
    assert 0 < found.kept.shift < 1
    assert "its 8-bit keys and values shift logits by 0." in found.summary()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in CONFIGS), *((name, "float32") for name in DECODED)]
)
def test_of_random_tree_rows_none_differs_in_any_bit(name: str, dtype: str, folders: dict[str, Path]) -> None:
    result = probe_rows(loaded(folders[name], dtype), 150, seed=1)
    assert result.num_differing == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_of_ten_thousand_tree_rows_none_differs_in_any_bit(name: str, folders: dict[str, Path]) -> None:
    assert probe_rows(loaded(folders[name], "bfloat16"), 10_000, seed=2).num_differing == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DECODED)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(
    name: str, with_parts: dict[str, Path]
) -> None:
    check_engines_give_plain_tokens_beside_a_resumed_job(loaded(with_parts[name], "bfloat16"))


def test_steps_count_the_experts_that_their_rows_meet_and_probes_the_most_and_the_fewest(
    folders: dict[str, Path],
) -> None:
    target = loaded(folders["Qwen3 30B A3B"], "float32")
    costs, counts = measure_step_costs(target), target.forwards.expert_counts
    assert costs.spread is not None
    assert counts is not None
    assert len(counts.seen()[0]) == 0, "what probes met is nobody's text"
    assert costs.spread.alike[0] == costs.spread.apart[0] == 2 * 3, "one row: three experts in each of two layers"
    assert 2 * 3 < costs.spread.apart[-1] <= 2 * 8
    assert costs.spread.alike[-1] < costs.spread.apart[-1]
    cache = target.new_cache(100)
    for token_ids in ([5], [5, 6, 7, 8]):
        target.verify([tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:]))])
    rows, met = counts.seen()
    assert rows.tolist() == [1, 4]
    assert met[0] == 6 < met[1] <= 16


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DECODED)
def test_texts_are_the_same_where_keys_and_values_lie_on_a_disk(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    check_a_disk_changes_no_text(folders[name], tmp_path)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_multiplied_in_our_kernels_on_both_devices(name: str) -> None:
    assert [path_on(device, text_view(WITH_EXPERTS[name])).name for device in ("cpu", "cuda")] == ["kernels"] * 2


def test_latent_vectors_are_kept_on_both_devices_and_take_what_is_counted(folders: dict[str, Path]) -> None:
    for name, config in WITH_LATENTS.items():
        assert [path_on(device, text_view(config)).name for device in ("cpu", "cuda")] == ["kernels"] * 2
        counted = bytes_per_position(text_view(config), "bfloat16")
        assert counted == loaded(folders[name], "bfloat16").cache_shape.bytes_per_position() == 2 * 2 * (64 + 32)


@pytest.mark.parametrize("name", WITH_INDEXERS)
def test_index_keys_follow_latent_vectors_on_both_devices(name: str, folders: dict[str, Path]) -> None:
    config = text_view(WITH_INDEXERS[name])
    assert [path_on(device, config).name for device in ("cpu", "cuda")] == ["kernels"] * 2
    counted, num_layers = bytes_per_position(config, "bfloat16"), config["num_hidden_layers"]
    assert counted == loaded(folders[name], "bfloat16").cache_shape.bytes_per_position()
    assert counted == 2 * num_layers * (64 + 32 + 48)


@pytest.mark.parametrize("name", WITH_INDEXERS)
def test_an_indexer_s_choice_decides_what_rows_see(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """So tests of logits would notice another choice: twice as many keys give other logits from row 20 on."""
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(WITH_INDEXERS[name] | {"index_topk": 40}))
    text, found = [7 * each % 64 for each in range(60)], []
    for folder in (folders[name], tmp_path):
        target = loaded(folder, "float32")
        [outputs] = target.verify([tree_rows(target.new_cache(100), text[0], DraftTree.chain(text[1:]))])
        found.append(outputs.logits)
    differs = (found[0] != found[1]).any(dim=1)
    assert not differs[:20].any()
    assert differs[20:].float().mean() > 0.9


@pytest.mark.parametrize("part", ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"])
def test_a_damaged_indexer_is_refused_though_logits_are_finite(
    part: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["GLM 5.2"], tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.2.self_attn.indexer.{part}"
    tensors[name].view(-1)[-1] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"numbers in {name} that are not finite"):
        loaded(tmp_path, "bfloat16")


def test_a_choice_is_the_same_whichever_rows_are_read_together(folders: dict[str, Path]) -> None:
    """Layers that share a choice take it from the layers before, which ran in another call."""
    target, text = loaded(folders["GLM 5.2"], "bfloat16"), [11 * each % 64 for each in range(200)]
    found = []
    for size, layers in ((200, ()), (64, ()), (7, ()), (50, (0, 1, 3))):
        cache = target.new_cache(300)
        while cache.length < len(text):
            target.read(cache, text[cache.length : cache.length + size], layers)
        [outputs] = target.verify([tree_rows(cache, 5, DraftTree.chain([6, 7]))], layers)
        found.append(outputs.logits)
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_latent_vectors_have_no_codes_of_8_bits(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"--kv-dtype int8: caches of .* hold a latent vector per position"):
        TargetModel.load(locate_model(str(folders["GLM 4.7 Flash"])), "float32", "cpu", kv_dtype="int8")


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("Qwen3 30B A3B", {"num_local_experts": 4}, "num_experts and num_local_experts are 4, 8"),
        ("Qwen3 30B A3B", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("Qwen3 30B A3B", {"moe_intermediate_size": 40}, "moe_intermediate_size is 40"),
        ("Qwen3 30B A3B", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("Qwen3 30B A3B", {"norm_topk_prob": None}, "norm_topk_prob is None"),
        ("Qwen3 30B A3B", {"expert_shift": 2}, "expert_shift, which may change a layer"),
        ("OLMoE 1B 7B", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("MiniMax M2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("dots.llm1", {"n_group": 3}, "2 of 3 groups of experts"),
        ("dots.llm1", {"topk_group": 1}, "1 groups of experts for 3 of a row"),
        ("DeepSeek R1", {"attention_bias": True}, "attention_bias is True"),
        ("DeepSeek R1", {"num_key_value_heads": 1}, "other heads of keys than of queries"),
        ("DeepSeek R1", {"v_head_dim": 40}, "found widths"),
        ("DeepSeek R1", {"rope_interleave": None}, "rope_interleave is None"),
        ("DeepSeek V2 Lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("GLM 4.7 Flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("DeepSeek V3.2", {"index_head_dim": 40}, "indexers of width 40"),
        ("DeepSeek V3.2", {"q_lora_rank": None}, "found indexers without a latent vector of queries"),
        ("DeepSeek V3.2", {"index_topk": 1 << 21}, "that choose 2,097,152 keys, expected at most 1,024 heads"),
        ("GLM 5.2", {"indexer_types": ["shared"] + ["full"] * 4}, "its indexer_types begin with shared"),
        ("GLM 5.2", {"indexer_types": None}, "its index_topk_freq stands without indexer_types"),
        ("GLM 5", {"indexer_rope_interleave": False}, "its indexer_rope_interleave is False"),
        ("GLM 5", {"rope_interleave": False}, "its rope_interleave is False"),
    ],
)
def test_experts_of_another_form_are_left_to_transformers_with_a_reason(
    name: str, said: dict[str, object], reason: str
) -> None:
    with pytest.raises(OtherDecoderError, match=reason):
        read_decoder_config(text_view(CONFIGS[name] | said))
