"""Dense decoders are read without transformers if that gives its exact model."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.transformers_weights import decoder_weights
from swiftbatch.worker.model import weight_files
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.digests import digests_of
from swiftbatch.worker.model.model_files import ModelFiles
from tests import ROOT

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
KINDS = {
    "llama": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"attention_bias": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    "another activation": {"hidden_act": "gelu"},
    "a window": {"sliding_window": 8},
    "stretched positions": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "older words for them": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "turns of a part of each head": {"partial_rotary_factor": 0.5},
    "a scale that is not known": {"logit_scale": 0.5},
    "layers with windows": {"layer_types": ["full_attention", "sliding_attention"]},
    "another kind": {"model_type": "granite"},
    "heads of an odd size": {"head_dim": 40},
    "biases that the files lack": {"attention_bias": True},
    "a head of its own": {"tie_word_embeddings": False},
}


def config_of(kind: str) -> PreTrainedConfig:
    config = AutoConfig.for_model(kind.split()[0], **SIZES, **KINDS[kind])
    if "qwen" in kind:
        config.layer_types = ["full_attention"] * 2
    return config


def saved(folder: Path, config: PreTrainedConfig) -> ModelFiles:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    return files_in(folder)


def files_in(folder: Path) -> ModelFiles:
    return ModelFiles("some-model", folder, digests_of(folder), 512, 48)


def tensors_of(weights: DecoderWeights) -> dict[str, torch.Tensor | None]:
    found = {"embedding": weights.embedding, "norm": weights.final_norm, "head": weights.head.weight}
    for number, layer in enumerate(weights.layers):
        for field in fields(layer):
            part = getattr(layer, field.name)
            if field.name in ("is_nope", "window"):
                assert not part
                continue
            pair = (part.weight, part.bias) if isinstance(part, Linear) else (part, None)
            found |= {f"{number} {field.name} {which}": each for which, each in zip("wb", pair, strict=True)}
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), config_of("llama")).path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_transformers_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    files = saved(tmp_path, config_of(kind))
    ours, theirs = dense_weights(files, dtype), decoder_weights(load_causal_lm(files, dtype))
    assert ours is not None
    assert theirs is not None
    assert ours.sizes == theirs.sizes
    assert (ours.rotary.frequencies == theirs.rotary.frequencies).all()
    assert ours.rotary.scaling == theirs.rotary.scaling
    found, expected = tensors_of(ours), tensors_of(theirs)
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or (other is not None and torch.equal(tensor, other)), name


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_says_more_is_left_to_transformers(change: str, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    assert dense_weights(files_in(llama), torch.float32) is not None
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | CHANGES[change]))
    assert dense_weights(files_in(tmp_path), torch.float32) is None


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("llama", "hidden_act"),
        ("llama", "rms_norm_eps"),
        ("qwen2", "rope_parameters"),
        ("qwen2", "num_key_value_heads"),
    ],
)
def test_nothing_is_left_to_a_default(kind: str, missing: str, tmp_path: Path) -> None:
    """Two keys of Llama may be absent: see `test_paper_models`."""
    saved(tmp_path, config_of(kind))
    config = json.loads((tmp_path / "config.json").read_text())
    del config[missing]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dense_weights(files_in(tmp_path), torch.float32) is None


@pytest.mark.parametrize("is_missing", [True, False])
def test_files_with_other_tensors_are_left_to_transformers(is_missing: bool, llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    if is_missing:
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.up_proj.lora"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").symlink_to(llama / "config.json")
    assert dense_weights(files_in(tmp_path), torch.float32) is None


def test_other_weights_in_the_folder_are_not_the_model_s(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    backup = {name: -tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(backup, tmp_path / "model_old.safetensors", metadata={"format": "pt"})
    ours, theirs = dense_weights(files_in(tmp_path), BF16), decoder_weights(load_causal_lm(files_in(tmp_path), BF16))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.layers[1].up.weight, theirs.layers[1].up.weight)


def test_of_shards_only_those_count_that_the_index_names(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    (tmp_path / "config.json").symlink_to(llama / "config.json")
    names = sorted(tensors)
    shards = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file, metadata={"format": "pt"})
    save_file({name: -tensors[name] for name in names}, tmp_path / "model-00003-of-00003.safetensors")
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ours = dense_weights(files_in(tmp_path), BF16)
    assert ours is not None
    assert torch.equal(ours.layers[1].up.weight, tensors["model.layers.1.mlp.up_proj.weight"])
    _, other = shards
    save_file(tensors, tmp_path / other, metadata={"format": "pt"})  # half of them twice, so that neither is trusted
    assert dense_weights(files_in(tmp_path), BF16) is None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of earlier tensors still held at every read."""
    notes: list[int] = []
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    empty = torch.empty

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        notes.append(sum(tensor.nbytes for tensor in alive))
        alive.add(tensor := empty(*args, **options))
        return tensor

    monkeypatch.setattr(weight_files.torch, "empty", noted)
    return notes


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "float32"])
def test_for_another_device_the_host_holds_one_tensor_beside_the_one_that_is_read(
    dtype: torch.dtype, llama: Path, held: list[int]
) -> None:
    """The other device is `meta`, which holds no bytes."""
    weights = dense_weights(files_in(llama), dtype, torch.device("meta"))
    assert weights is not None
    kept = [tensor for tensor in tensors_of(weights).values() if tensor is not None]
    assert {(tensor.device.type, tensor.dtype) for tensor in kept} == {("meta", dtype)}
    stored = load_file(llama / "model.safetensors").values()
    assert len(held) == len(stored)
    assert max(held) <= max(tensor.nbytes for tensor in stored), "the one before is hashed when the next one is read"


def test_on_the_cpu_the_tensors_that_were_read_are_those_that_are_kept(llama: Path) -> None:
    weights = dense_weights(files_in(llama), BF16)
    assert weights is not None
    kept = {tensor.data_ptr(): tensor for tensor in tensors_of(weights).values() if tensor is not None}
    stored = load_file(llama / "model.safetensors").values()
    assert sum(tensor.nbytes for tensor in kept.values()) == sum(tensor.nbytes for tensor in stored)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept.values()}) == len(stored), "no views of one file"


@pytest.mark.long
def test_a_worker_with_the_embedded_model_needs_no_models_of_transformers() -> None:
    """So a worker starts seconds sooner."""
    program = (
        "import sys; from swiftbatch.worker.model.model_files import locate_model\n"
        "from swiftbatch.worker.forward.target_model import TargetModel; import swiftbatch.worker.session.session\n"
        "target = TargetModel.load(locate_model('embedded'), 'bfloat16', 'cpu'); "
        "print('native' in target.forwards.numerics, 'transformers.modeling_utils' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout in ("True False\n", "False True\n")  # the second where no compiler was found


@pytest.mark.parametrize("kind", ["llama", "gemma", "olmo"])
def test_a_head_that_is_the_tied_embedding_once_more_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Qwen3 0.6B is published so."""
    config = config_of("llama") if kind == "llama" else AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=True)
    files = saved(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = files_in(tmp_path)
    assert (dense_weights(files, BF16) is not None) == (kind != "olmo")
    model = load_causal_lm(files, BF16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][5, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (dense_weights, load_causal_lm):
        if load is load_causal_lm or kind != "olmo":
            with pytest.raises(ModelError, match="ties the head to the embedding, and its weights hold another"):
                load(files_in(tmp_path), BF16)


def test_layers_that_predict_further_tokens_are_passed_over_where_the_config_counts_them(
    llama: Path, tmp_path: Path
) -> None:
    tensors, config = load_file(llama / "model.safetensors"), json.loads((llama / "config.json").read_text())
    behind = {
        name.replace("layers.1.", "layers.2."): each.clone() for name, each in tensors.items() if "layers.1." in name
    }
    save_file(tensors | behind, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dense_weights(files_in(tmp_path), BF16) is None, "else a layer that is missing in the config would be lost"
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    ours = dense_weights(files_in(tmp_path), BF16)
    assert ours is not None
    assert torch.equal(ours.layers[1].up.weight, tensors["model.layers.1.mlp.up_proj.weight"])
