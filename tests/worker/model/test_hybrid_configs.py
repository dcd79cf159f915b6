"""Published hybrid configs give transformers' choices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from swiftbatch.worker.exactness.forward_comparisons import probe_rows
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.quantized_weights import PackedLinear
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.text_config import text_view
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import logits_of, make_twins
from tests.worker.model.kind_parts import tiny_model
from tests.worker.model.kind_sizes import VOCAB_SIZE

pytestmark = pytest.mark.long

NUM_TOKENS = 200
TEXT = [(7 * i + 3) % 90 for i in range(NUM_TOKENS)]
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "use_cache": True,
}
NEMOTRON = SMALL | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "intermediate_size": 96,
    "mamba_head_dim": 16,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 4,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 2,
    "num_hidden_layers": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
}
MAMBA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-05,
}
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads as wide as the kernels take
GRANITE: dict[str, Any] = (
    SMALL
    | MAMBA
    | WIDE
    | {
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "init_method": "mup",
        "intermediate_size": 48,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "logits_scaling": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000,
        "shared_intermediate_size": 96,
        "tie_word_embeddings": True,
    }
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "Nemotron 3 Nano": NEMOTRON
    | {
        "head_dim": 64,
        "hybrid_override_pattern": "MEM*EM*E",
        "layer_norm_epsilon": 1e-05,
        "mamba_ssm_cache_dtype": "float32",
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
    "Nemotron-H": NEMOTRON
    | {
        "hybrid_override_pattern": "M-M*-M*-",
        "rms_norm_eps": 1e-05,
        "time_step_limit": [0.0, float("inf")],
        "time_step_rank": 512,
    },
    "Granite 4 h": GRANITE,
    "Granite 4 h micro": GRANITE | {"num_experts_per_tok": 0, "num_local_experts": 0},
    "Bamba": SMALL
    | MAMBA
    | {
        "attn_layer_indices": [1, 3],
        "attn_rotary_emb": 32,
        "head_dim": 64,
        "intermediate_size": 96,
        "mamba_d_head": "auto",
        "mamba_n_groups": 2,
        "mamba_n_heads": 4,
        "mlp_bias": False,
        "model_type": "bamba",
        "num_hidden_layers": 4,
        "num_logits_to_keep": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "z_loss_coefficient": 0.0,
    },
    "Falcon-H1": SMALL
    | MAMBA
    | {
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "intermediate_size": 96,
        "key_multiplier": 0.39,
        "lm_head_multiplier": 0.0390625,
        "mamba_d_head": 32,
        "mamba_d_ssm": 96,
        "mamba_n_groups": 1,
        "mamba_n_heads": 3,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "mlp_multipliers": [0.88, 0.58],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "projectors_bias": False,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
        "ssm_out_multiplier": 0.23,
        "tie_word_embeddings": False,
    },
    "LFM2": SMALL
    | WIDE
    | {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 128,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 128,
        "full_attn_idxs": [2, 4],
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_heads": 2,
        "num_hidden_layers": 5,
        "rope_theta": 1000000.0,
        "use_pos_enc": True,
    },
    "Qwen3.5": SMALL
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "intermediate_size": 96,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
    },
    "Qwen3-Next": SMALL
    | {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "intermediate_size": 96,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 48,
        "tie_word_embeddings": False,
    },
}

PUBLISHED["Nemotron 3 Super"] = PUBLISHED["Nemotron 3 Nano"] | {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 96,
    "mtp_layers_block_type": ["attention", "moe"],
    "n_group": 2,
    "n_routed_experts": 8,
    "num_nextn_predict_layers": 1,
    "time_step_limit": [0.0, float("inf")],
}
for key in ("hybrid_override_pattern", "num_hidden_layers"):
    del PUBLISHED["Nemotron 3 Super"][key]
PUBLISHED["Falcon-H1 with norms"] = PUBLISHED["Falcon-H1"] | {
    "attention_in_multiplier": 0.7,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "mamba_rms_norm": True,
}
NUM_ROWS = 10_000  # of random trees, in the slow test
OFTEN, SLOW = ("Falcon-H1", "Nemotron 3 Super", "Qwen3-Next"), pytest.mark.slow


def publish(config: dict[str, Any], folder: Path) -> Any:
    """Use the class's tensor names."""
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    model = tiny_model(AutoConfig.from_pretrained(folder))
    for name, numbers in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            numbers += 0.3 * torch.randn_like(numbers)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return model


def loaded(folder: Path, dtype: str) -> TargetModel:
    target = TargetModel.load(locate_model(str(folder)), dtype, "cpu")
    assert isinstance(target.forwards, NativeForwards)
    return target


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_hybrid_makes_the_choices_of_transformers(name: str, tmp_path: Path) -> None:
    model = publish(PUBLISHED[name], tmp_path)
    found = logits_of(loaded(tmp_path, "float32"), TEXT)
    expected = model(input_ids=torch.tensor([TEXT])).logits[0]
    assert int((found.argmax(-1) == expected.argmax(-1)).sum()) == NUM_TOKENS
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    inspection = inspect_model(str(tmp_path))
    assert inspection.state_bytes > 0
    assert inspection.cpu is not None
    assert inspection.cpu.name == "kernels"


def test_where_the_kernels_lack_something_the_class_reads_tensors_by_its_own_names(tmp_path: Path) -> None:
    model = publish(PUBLISHED["Nemotron-H"] | {"residual_in_fp32": True}, tmp_path)
    files = locate_model(str(tmp_path))
    assert dense_weights(files, torch.float32) is None
    token_ids = torch.tensor([TEXT])
    read = load_causal_lm(files, torch.float32)
    assert torch.allclose(read(token_ids).logits, model(token_ids).logits, atol=1e-3)


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=SLOW) for name in PUBLISHED])
def test_of_random_tree_rows_none_differs_in_any_bit(name: str, tmp_path: Path) -> None:
    publish(PUBLISHED[name], tmp_path)
    assert probe_rows(loaded(tmp_path, "bfloat16"), 100, seed=1, first_length=BLOCK).num_differing == 0


@SLOW
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_of_ten_thousand_tree_rows_none_differs_in_any_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Texts grow to 1,500 tokens, past twenty boundaries."""
    publish(PUBLISHED[name], tmp_path)
    assert probe_rows(loaded(tmp_path, dtype), NUM_ROWS, seed=2).num_differing == 0


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("Nemotron 3 Super", "ModelOpt NVFP4"),
        pytest.param("Nemotron 3 Super", "ModelOpt FP8", marks=SLOW),
        pytest.param("Falcon-H1", "ModelOpt FP8", marks=SLOW),
    ],
)
def test_packed_weights_give_the_bits_of_their_dequantized_twin(name: str, packed: str, tmp_path: Path) -> None:
    publish(PUBLISHED[name], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twins = make_twins(EXAMPLES[packed], tmp_path, PUBLISHED[name], tensors)
    found, expected = (logits_of(loaded(folder, "bfloat16"), TEXT[:70]) for folder in twins)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)
    assert num_packed(twins[0]) > 0


def num_packed(folder: Path) -> int:
    weights = dense_weights(locate_model(str(folder)), torch.bfloat16)
    assert weights is not None
    mixers = [each for layer in weights.layers if layer.mixer for each in layer.mixer.linears.values()]
    experts = [each for layer in weights.layers if layer.experts for each in layer.experts.ups]
    return sum(isinstance(each, PackedLinear) for each in (*mixers, *experts))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Nemotron-H", {"hybrid_override_pattern": "*-*-*-*-"}, "none of its layers has a state"),
        ("Nemotron-H", {"mamba_hidden_act": "gelu"}, "its mamba_hidden_act is 'gelu'"),
        ("Nemotron 3 Nano", {"n_shared_experts": 2}, "its n_shared_experts is 2"),
        ("Nemotron 3 Nano", {"moe_latent_size": 24}, "its moe_latent_size is 24"),
        ("Falcon-H1", {"mlp_multipliers": [1.0]}, "its mlp_multipliers is"),
        ("Falcon-H1", {"ssm_multipliers": [1.0, 2.0, "x", 1.0, 1.0]}, "its ssm_multipliers is"),
        ("Falcon-H1 with norms", {"mamba_norm_before_gate": True}, "its mamba_norm_before_gate is True"),
        ("Bamba", {"hidden_act": "relu2"}, "its hidden_act is 'relu2'"),
    ],
)
def test_what_the_kernels_do_not_have_is_left_to_the_layers_of_transformers(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(OtherDecoderError, match=re.escape(words)):
        read_decoder_config(text_view(PUBLISHED[name] | changes))
