"""Models of text and images give their whole class's texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.model.text_config import text_name, text_view
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.model.kind_parts import NUM_POSITIONS, SIZES

NUM_TOKENS = 40
FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")  # stored with rows for columns
SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
SMALL_TOWER |= {"num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "image_size": 28}
SMALL_TOWER |= {"patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
TEXT = {
    key: value for key, value in SIZES.items() if not (key.endswith("_token_id") or "expert" in key or "moe" in key)
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {  # by kind: the prefix of published text tensors, and the text's config
    "gemma3": ("language_model.model.", {"model_type": "gemma3_text", "sliding_window": 16}),
    "llama4": (
        "language_model.model.",
        {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,  # only the last one sees all positions
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 96,
            **EXPERTS,
        },
    ),
    "mistral3": (
        "language_model.model.",
        {
            "model_type": "mistral",
            "head_dim": 64,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e9,
            "sliding_window": None,
        },
    ),
    "qwen3_vl": (
        "model.language_model.",
        {
            "model_type": "qwen3_vl_text",
            "head_dim": 64,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [16, 8, 8], "rope_type": "default"},
        },
    ),
}


VL_EXPERTS = {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True, "mlp_only_layers": []}
VL_EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
WHOLE["qwen3_vl_moe"] = (
    "model.language_model.",
    WHOLE["qwen3_vl"][1]
    | {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True, "mlp_only_layers": []}
    | VL_EXPERTS,
)

WHOLE["kimi_k25"] = (
    "language_model.model.",
    {
        "model_type": "kimi_k2",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,  # of the rotated part, which published configs leave to the class
        "hidden_act": "silu",
        "kv_lora_rank": 32,
        "moe_intermediate_size": 48,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    },
)


RECURRENT_TEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
WHOLE["qwen3_5"] = ("model.language_model.", RECURRENT_TEXT | {"model_type": "qwen3_5_text"})
WHOLE["qwen3_5_moe"] = (
    "model.language_model.",
    RECURRENT_TEXT
    | {"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    | {"shared_expert_intermediate_size": 48},
)


def whole_model(kind: str) -> Any:
    """Return a random model of transformers' class with changed norms."""
    config = AutoConfig.for_model(kind, text_config=TEXT | WHOLE[kind][1], vision_config=SMALL_TOWER)
    config.text_config.initializer_range = 0.3
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


def publish(model: Any, kind: str, folder: Path) -> ModelFiles:
    prefix, text_config = WHOLE[kind]
    config = {"model_type": kind, "text_config": TEXT | text_config, "vision_config": SMALL_TOWER}
    config["tie_word_embeddings"] = model.config.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    model.save_pretrained(folder / "saved")
    tensors = {}
    for saved, tensor in load_file(folder / "saved" / "model.safetensors").items():
        name = saved.replace("language_model.model.blocks.", "language_model.model.layers.")  # as in Kimi K2.5
        known = text_name(name, text_view(config))
        is_body = known is not None and known.startswith("model.")
        head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"
        tensors[prefix + known.removeprefix("model.") if is_body and known else head if known else name] = tensor
    turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if name.endswith(FUSED)}
    tensors |= turned if kind == "qwen3_vl_moe" else {}
    assert any(name.startswith(prefix) for name in tensors)
    assert any(text_name(name, text_view(config)) is None for name in tensors), "there is a tower for images"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return locate_model(str(folder))


def logits_of(files: ModelFiles, token_ids: list[int]) -> torch.Tensor:
    target = TargetModel.load(files, "float32", "cpu")
    cache = target.new_cache(len(token_ids) + 8)
    return target.verify([tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:]))])[0].logits


@pytest.mark.parametrize("kind", WHOLE)
def test_a_text_has_the_logits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = whole_model(kind)
    files = publish(model, kind, tmp_path)
    token_ids = [(7 * i + 3) % 90 for i in range(NUM_TOKENS)]
    expected = model(input_ids=torch.tensor([token_ids])).logits[0]
    found = logits_of(files, token_ids)
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert files.max_positions == NUM_POSITIONS
    assert read_sizes(files, "float32") is not None, "a GPU's memory can be planned"


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl"])
def test_dense_texts_are_read_for_our_kernels(kind: str, tmp_path: Path) -> None:
    assert dense_weights(publish(whole_model(kind), kind, tmp_path), torch.float32) is not None


def test_what_published_configs_leave_out_is_what_their_class_has() -> None:
    for kind, form in ARCHITECTURES.items():
        defaults, numbers = AutoConfig.for_model(kind), form.defaults
        angles = getattr(defaults, "rope_parameters", None) or {}
        angles = angles.get("main", angles)  # of DeepSeek V4's windows
        assert numbers == {name: angles[name] if name == "rope_theta" else getattr(defaults, name) for name in numbers}
        assert text_view({"text_config": {"model_type": kind}}) == {"model_type": kind, **numbers}


def test_a_config_that_nests_a_quantized_model_is_refused_by_its_format(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": TEXT | WHOLE["mistral3"][1]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ModelError, match=r"its weights are quantized .*'hqq'"):
        locate_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.4.enorm.weight", None),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.layers.5.mlp.up_proj.weight", "model.layers.5.mlp.up_proj.weight"),  # then it is one too many
        ("mtp.fc.weight", None),
        ("model.mtp_layers.0.input_layernorm.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.transformer.layers.0.attention.k_proj.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("mm_projector.proj.0.weight", None),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("visual_words.weight", "visual_words.weight"),
    ],
)
def test_tensors_that_change_no_text_are_passed_over_by_name(name: str, expected: str | None) -> None:
    assert text_name(name, {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}) == expected


def test_experts_are_taken_as_published_and_as_newer_versions_write_them(tmp_path: Path) -> None:
    model, token_ids = whole_model("qwen3_vl_moe"), list(range(1, 30))
    files = publish(model, "qwen3_vl_moe", tmp_path)
    published = logits_of(files, token_ids)
    tensors = load_file(tmp_path / "model.safetensors")
    newer = {n: each.transpose(1, 2).contiguous() if n.endswith(FUSED) else each for n, each in tensors.items()}
    save_file(newer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(locate_model(str(tmp_path)), token_ids), published)
