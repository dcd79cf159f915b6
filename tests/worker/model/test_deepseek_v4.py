"""DeepSeek V4 gives transformers' texts, and the same bits in every company."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.target_model import load_forwards
from swiftbatch.worker.forward.tile_packing import known_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.model_files import locate_model, read_config
from swiftbatch.worker.model.rank_faults import ranks_fault
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.deepseek_v4_parts import (
    FP8,
    NVFP4,
    PUBLISHED,
    SHORT,
    Packed,
    in_fp4,
    in_nvfp4,
    random_tensors,
    twins,
    write,
    write_v4,
)
from tests.worker.model.formats.twins import logits_of
from tests.worker.model.kind_promises import check_texts_are_those_of_transformers, decode, loaded

pytestmark = [pytest.mark.long, needs_kernels]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v4(tmp_path_factory.mktemp("short"))


@pytest.mark.parametrize("config", [PUBLISHED, SHORT], ids=["published", "short"])
def test_logits_and_greedy_texts_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    target = loaded(write(tmp_path, config, random_tensors(config)), "float32")
    check_texts_are_those_of_transformers(target)


def test_eight_jobs_together_get_the_tokens_that_each_gets_alone(folder: Path) -> None:
    target = loaded(folder, "bfloat16")

    def texts() -> list[Sequence]:
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
        prompts = [[(7 * i + each) % 200 for i in range(20 + 31 * each)] for each in range(8)]
        return [Sequence(f"s{i}", prompt, params, target.vocab_size) for i, prompt in enumerate(prompts)]

    alone = [decode(target, "autoregressive", [text])[0] for text in texts()]
    assert decode(target, "autoregressive", texts()) == alone


def test_chunks_of_a_prompt_change_no_bit(folder: Path) -> None:
    target = loaded(folder, "bfloat16")
    token_ids = [11 * each % target.vocab_size for each in range(200)]
    found = []
    for size in (1, 7, 64, 200):
        cache, logits = target.new_cache(300), []
        while cache.length < len(token_ids):
            rows = known_rows(cache, token_ids[cache.length : cache.length + size])
            logits += [outputs.logits for outputs in target.verify(rows)]
            cache.advance(sum(map(len, rows)))
        found.append((torch.cat(logits), torch.from_numpy(cache.kv(0, len(token_ids)))))
    for logits, kv in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(kv, found[0][1])


@pytest.mark.parametrize(("quantized", "experts"), [(FP8, in_fp4), (NVFP4, in_nvfp4)], ids=["fp4", "nvfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_weights_give_the_bits_of_their_dequantized_twin(
    quantized: dict[str, Any], experts: Callable[[Tensor], Packed], dtype: str, tmp_path: Path
) -> None:
    packed, dense = twins(tmp_path, quantized, experts)
    assert inspect_model(str(packed)).refusal is None
    ours, theirs = (logits_of(loaded(each, dtype)) for each in (packed, dense))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "part",
    [
        "layers.1.attn.compressor.ape",
        "layers.1.attn.compressor.norm.weight",
        "layers.1.attn.indexer.compressor.ape",
        "layers.1.attn.indexer.weights_proj.weight",
        "layers.2.attn.compressor.wgate.weight",
        "layers.4.attn.attn_sink",
        "layers.5.ffn.gate.bias",
        "layers.0.hc_attn_base",
        "hc_head_scale",
    ],
)
def test_each_part_changes_logits(part: str, folder: Path, tmp_path: Path) -> None:
    """So tests of logits would notice its absence."""
    tensors = load_file(folder / "model.safetensors")
    tensors[part] = tensors[part] + torch.randn_like(tensors[part])
    text = [7 * each % 200 for each in range(80)]
    changed = loaded(write(tmp_path, SHORT, tensors), "float32")
    ours, theirs = (logits_of(target, text) for target in (changed, loaded(folder, "float32")))
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_a_table_chooses_the_experts_of_a_token(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.ffn.gate.tid2eid"] = (tensors["layers.0.ffn.gate.tid2eid"] + 1) % 8
    changed = loaded(write(tmp_path, SHORT, tensors), "float32")
    assert not torch.allclose(logits_of(changed), logits_of(loaded(folder, "float32")), atol=1e-2)
    tensors["layers.0.ffn.gate.tid2eid"][5, 1] = 8
    with pytest.raises(ModelError, match="found a table of experts of"):
        loaded(write(tmp_path, SHORT, tensors), "float32")


@pytest.mark.parametrize("shape", [(200, 2), (200, 4), (199, 3), (201, 3)])
def test_a_table_of_another_shape_is_refused(shape: tuple[int, int], folder: Path, tmp_path: Path) -> None:
    """The kernels would read behind its end, or experts of other tokens."""
    tensors = load_file(folder / "model.safetensors") | {"layers.0.ffn.gate.tid2eid": torch.ones(shape).long()}
    with pytest.raises(ModelError, match=r"found table of experts of torch.int32 .*, expected torch.int32 \[200, 3\]"):
        loaded(write(tmp_path, SHORT, tensors), "float32")


@pytest.mark.parametrize(
    ("name", "damaged", "reason"),
    [
        ("layers.0.attn.kv_norm.weight", torch.ones(65), "found a norm of keys of 65, expected 64"),
        ("hc_head_scale", torch.tensor([-torch.inf]), "hc_scale that are not finite"),
        ("layers.1.hc_ffn_base", torch.full((24,), -torch.inf), "numbers in .* that are not finite"),
    ],
)
def test_what_would_leave_logits_finite_is_refused(
    name: str, damaged: torch.Tensor, reason: str, folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert name in tensors
    with pytest.raises(ModelError, match=reason):
        loaded(write(tmp_path, SHORT, tensors | {name: damaged}), "float32")


def test_a_gpu_is_refused(folder: Path) -> None:
    found = inspect_model(str(folder))
    assert found.cuda is not None
    assert found.cuda.name == "none"
    with pytest.raises(ModelError, match=r"it does not run on a GPU: its layers have compressed keys"):
        load_forwards(locate_model(str(folder)), torch.bfloat16, torch.device("cuda"))
    assert ranks_fault(read_decoder_config(read_config("", folder)), 2) == "its layers have compressed keys"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"scoring_func": "softmax"}, "its scoring_func is 'softmax'"),
        ({"n_shared_experts": 2}, "its n_shared_experts is 2"),
        ({"norm_topk_prob": False}, "its norm_topk_prob is False"),
        ({"num_key_value_heads": 2}, "its num_key_value_heads is 2"),
        ({"compress_ratios": [0, 4, 16, 4, 0, 4]}, "layers of the kinds 16"),
        ({"compress_ratios": [0, 4]}, "layer_types = .*; expected a list of 6"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "compress_rates = .* positive integers"),
        ({"compress_rates": {"compressed_sparse_attention": 256, "heavily_compressed_attention": 8}}, "512 positions"),
        ({"compress_rope_theta": 1}, "compress_rope_theta = 1; expected a finite number above 0, other than 1"),
        ({"hc_mult": 17}, "found 17 streams"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0"),
        ({"o_groups": 3}, "found 3 groups of 4 heads"),
        ({"index_head_dim": 96}, "found indexers of width 96"),
        ({"head_dim": 576}, "found heads of 576"),
        ({"swiglu_limit": None}, "swiglu_limit = None"),
        ({"expert_dtype": "fp3", "quantization_config": FP8}, "expert_dtype = 'fp3'"),
        ({"quantization_config": NVFP4 | {"moe_bits": 3}}, "moe_bits = 3, which is not understood"),
        ({"value_shift": 2}, "value_shift, which may change a layer"),
    ],
)
def test_other_forms_are_refused_in_a_line(said: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHORT | said))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=reason) as caught:
        loaded(tmp_path, "bfloat16")
    assert "\n" not in str(caught.value)


def test_a_config_is_read_as_its_class_writes_it(folder: Path, tmp_path: Path) -> None:
    written = AutoConfig.for_model(**json.loads(json.dumps(SHORT)))
    written.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert "compress_ratios" not in json.loads((tmp_path / "config.json").read_text())
    ours, theirs = (logits_of(loaded(each, "float32")) for each in (tmp_path, folder))
    assert torch.equal(ours, theirs)


def test_a_config_for_another_tool_leaves_numbers_to_its_class(folder: Path, tmp_path: Path) -> None:
    unsaid = ("hidden_act", "rms_norm_eps", "rope_theta", "routed_scaling_factor", "norm_topk_prob")
    said = {key: each for key, each in SHORT.items() if key not in unsaid} | {"model_type": "deepseek_ref"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    ours, theirs = (loaded(each, "float32") for each in (tmp_path, folder))
    assert torch.equal(logits_of(ours), logits_of(theirs))
    assert compare(ours).agrees
