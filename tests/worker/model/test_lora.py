"""LoRA adapters compute what PEFT's adapters mean, or are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import known_rows
from swiftbatch.worker.model.lora import WEIGHTS_FILE
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.expert_configs import WITH_EXPERTS
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.llama_like_configs import LIKE_LLAMA
from tests.worker.model.lora_parts import ALL, ATTENTION, located, with_adapter, write, write_adapter
from tests.worker.model.test_dense_loading import saved

pytestmark = needs_kernels

NUM_CHOICES, BASE = 200, "base_model.model.model.layers.0.self_attn.q_proj"
FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
KINDS = {  # fused layers, turned heads with fused gates, experts
    "phi3": (LIKE_LLAMA["Phi-4"], FUSED),
    "glm": (LIKE_LLAMA["GLM-4 9B"], (*ATTENTION, "gate_up_proj", "down_proj")),
    "qwen3_moe": (WITH_EXPERTS["Qwen3 30B A3B"], ATTENTION),
}


def choices(model: Path, adapter: Path, scales: dict[str, float]) -> int:
    """Return for how many of `NUM_CHOICES` rows the likeliest token is the one of transformers."""
    target = TargetModel.load(locate_model(str(model)), "float32", "cpu", loras=located(own=adapter))
    ids = torch.randint(3, target.vocab_size, (NUM_CHOICES,), generator=torch.Generator().manual_seed(2))
    cache = target.new_cache(NUM_CHOICES, lora="own")
    ours = target.verify(known_rows(cache, ids.tolist())).logits.together
    theirs = with_adapter(model, adapter, scales)(input_ids=ids[None]).logits[0]
    plain = target.verify(known_rows(target.new_cache(NUM_CHOICES), ids.tolist())).logits.together
    assert (plain.argmax(1) != ours.argmax(1)).sum() > 10  # the adapter matters
    return int((ours.argmax(1) == theirs.argmax(1)).sum())


def test_choices_are_those_of_transformers_with_the_adapter(tiny_model: Path, tmp_path: Path) -> None:
    assert choices(tiny_model, write_adapter(tmp_path, tiny_model), {"proj": 2.0}) == NUM_CHOICES


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_those_of_transformers_where_weights_are_stored_otherwise(kind: str, tmp_path: Path) -> None:
    config, targets = KINDS[kind]
    published = config | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    saved(tmp_path / "model", AutoConfig.for_model(**published))
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", targets=targets)
    assert choices(tmp_path / "model", adapter, {"proj": 2.0}) == NUM_CHOICES


def test_patterns_roots_and_layers_count_as_in_peft(tiny_model: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"v_proj": 20}, "alpha_pattern": {"k_proj": 4, "v_proj": 40}}
    adapter = write_adapter(tmp_path, tiny_model, use_rslora=True, layers_to_transform=[1], **patterns)
    kept = {name: each for name, each in load_file(adapter / WEIGHTS_FILE).items() if "layers.1." in name}
    save_file(kept, adapter / WEIGHTS_FILE)
    scales = {"v_proj": 40 / 20**0.5, "k_proj": 4 / 8**0.5, "proj": 16 / 8**0.5}
    assert choices(tiny_model, adapter, scales) == NUM_CHOICES


def said(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return change


def stored(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return change_file


def named(*keys: str) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors.update({f"base_model.model.{key}": torch.zeros(8, 64) for key in keys}))


BEYOND = "model.layers.2.self_attn.q_proj.lora_{}.weight"
A, B = f"{BASE}.lora_A.weight", f"{BASE}.lora_B.weight"
REFUSED = {
    "modules_to_save is ['lm_head'], not supported": said(modules_to_save=["lm_head"]),
    "bias is 'all', not supported; expected 'none'": said(bias="all"),
    "use_dora is True, not supported": said(use_dora=True),
    "init_lora_weights is 'pissa', not supported": said(init_lora_weights="pissa"),
    "peft_type is 'IA3', not supported": said(peft_type="IA3"),
    "a_new_key is 3, not supported": said(a_new_key=3),
    "r is 0, expected a rank from 1 to 256": said(r=0),
    "r is 300, expected a rank from 1 to 256": said(r=300),
    "lora_alpha or a number of alpha_pattern is no number": said(lora_alpha=None),
    "expected targets of adapter_config.json alone": said(target_modules=["v_proj"]),
    "has the target 'other_proj', and": said(target_modules=[*ALL, "other_proj"]),
    "has the target '', and": said(target_modules=[*ALL, ""]),
    "in adapter_config.json, expected a regular expression": said(target_modules="a{99999999999}"),
    "(((( in adapter_config.json, expected a regular expression": said(rank_pattern={"(" * 3000: 8}),
    "that take too long, expected simpler regular expressions": said(target_modules="(model|m.*)*(.*.*)*x"),
    "in adapter_config.json that take too long": said(alpha_pattern={"(.*.*)*(.*.*)*x": 8}),
    r"a\nkey is 3, not supported": said(**{"a\nkey": 3}),
    "use_rslora is 'false', expected true or false": said(use_rslora="false"),
    "times its scale, 124999, exceeds float32": lambda folder: (
        said(lora_alpha=999_992)(folder),
        stored(lambda tensors: tensors[B].fill_(1e38))(folder),
    ),
    "expected [16, 128] in": said(r=16),
    "adapter_config.json cannot be read": lambda folder: (folder / "adapter_config.json").write_text("{", "utf-8"),
    "found no adapter_model.safetensors": lambda folder: (folder / WEIGHTS_FILE).unlink(),
    "is damaged or cut off": lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"1234567890"),
    "without its lora_B.weight, expected both": stored(lambda tensors: tensors.pop(B)),
    "as F32 [65, 8], expected [256, 8]": stored(lambda tensors: tensors.update({B: torch.zeros(65, 8)})),
    "lora_A.weight has numbers that are not finite": stored(lambda tensors: tensors[A].fill_(torch.nan)),
    "those of embeddings, heads and towers are not supported": named("lm_head.lora_A.weight", "lm_head.lora_B.weight"),
    "expected weights of LoRA in linear layers alone": named("model.embed_tokens.lora_embedding_A"),
    "expected one pair for each linear layer": stored(
        lambda tensors: tensors.update(
            {key.replace(".model.model", ".model.language_model.model"): tensors[key].clone() for key in (A, B)}
        )
    ),
    "expected linear layers in the model's 2 layers": named(*(BEYOND.format(part) for part in "AB")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_adapter_that_is_not_plain_lora_of_the_model_s_layers_is_refused(
    words: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_model)
    REFUSED[words](folder)
    with pytest.raises(ModelError, match=f"^adapter own: .*{re.escape(words)}"):
        TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu", loras=located(own=folder))


@pytest.mark.parametrize("name", ["DeepSeek R1", "Qwen3 30B A3B"])
def test_weights_that_the_kernels_multiply_otherwise_are_refused(name: str, tmp_path: Path) -> None:
    published = (WITH_EXPERTS | WITH_LATENTS)[name] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    saved(tmp_path / "model", AutoConfig.for_model(**published))
    key = "base_model.model.model.layers.1.mlp.gate"
    pair = {f"{key}.lora_A.weight": torch.zeros(8, 64), f"{key}.lora_B.weight": torch.zeros(4, 8)}
    write(tmp_path / "adapter", pair, r=8, lora_alpha=8, target_modules=["gate"])
    words = (
        "latent or compressed attention" if name == "DeepSeek R1" else "the kernels' other products take no adapters"
    )
    with pytest.raises(ModelError, match=words):
        TargetModel.load(
            locate_model(str(tmp_path / "model")), "float32", "cpu", loras=located(own=tmp_path / "adapter")
        )


def test_nothing_but_our_kernels_runs_adapters(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loras = located(own=write_adapter(tmp_path, tiny_model))
    monkeypatch.setenv("SWIFTBATCH_ISA", "torch")
    with pytest.raises(ModelError, match="only our kernels run LoRA adapters, and these do not run here"):
        TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu", loras=loras)
