"""Draft parts that others trained and published, written as this project's parts: `swiftbatch train import`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import DRAFT_MODEL, FINGERPRINT, ORIGIN, ReadPart, Shape
from swiftbatch.worker.drafters.engine_options import TriForceOptions
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.model.config_values import BASE, POSITIVE, SIZE, Config
from swiftbatch.worker.model.digests import digests_of, weight_files
from swiftbatch.worker.model.file_checks import PICKLED_FILE, SINGLE_FILE, json_object
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX
from swiftbatch.worker.model.model_files import (
    GRIFFIN_FILE,
    ModelFiles,
    let_others_read,
    locate_model,
    read_config,
    stored_layout,
)
from swiftbatch.worker.model.text_config import EMBEDDING, OLD_ANGLES
from swiftbatch.worker.model.weight_files import stored_tensors
from swiftbatch.worker.quantizing import copy_small_files
from swiftbatch.worker.training.training_folder import held

EPSILON, THETA = 1e-6, 10_000.0  # what the configs of EAGLE and GRIFFIN default to
MOST_DISTANCE = 0.01  # of two embeddings that differ in rounding alone, relative to their norm
TOKENS, LAYER = "embed_tokens.weight", "layers.0."
INPUT_NORM, QUERY_BIAS = (f"{LAYER}{name}" for name in ("input_layernorm.weight", "self_attn.q_proj.bias"))
FUSE = "fusion.fuse.weight"
OPTIONAL = ("fusion.fuse.bias", "layer.self_attn.o_proj.bias")  # our tensors that a published layer may lack
NAMES = {  # beginnings of our names, and published ones
    "eagle": {"fusion.fuse.": "fc."},
    "griffin": {
        "fusion.fuse.": "fc.fc.",
        "fusion.first_norm.": "fc.post_attention_layernorm.",
        "fusion.norm.": "fc.mlp.input_layernorm.",
        "fusion.up.": "fc.mlp.up_proj.",
        "fusion.down.": "fc.mlp.down_proj.",
    },
}
OF_EAGLE_3 = ("d2t", "midlayer.")  # names that begin so
HEADS = "medusa_layers.0.linear.weight"  # TokenSwift's name of its first head


def import_part(kind: str, folder: Path, model: str, output: Path, report: Callable[[str], None]) -> None:
    """Write a published part for a model to `output`. Raises ModelError for one that no engine here computes."""
    files = locate_model(model)
    if kind == "tokenswift":
        _refuse_heads(folder, model)
    with held(output):
        if kind == "draft":
            written, engine = _import_draft(folder, files, output), DRAFT_MODEL.engine
        else:
            written, engine = _import_layer(kind, folder, files, output), "griffin"
    report(f"wrote {written}; use it with --engine {engine} --draft-model {output}")


def _refuse_heads(folder: Path, model: str) -> None:
    if not any(name.endswith(HEADS) for name in _tensors(folder)):
        raise ModelError(f"{folder}: it has no {HEADS}; expected the heads that TokenSwift's authors publish")
    raise ModelError(
        f"{folder}: its heads norm what they read and what they give, and begin with the hidden state in front of the "
        "model's last norm, which no forward here hands out; train heads with `swiftbatch train tokenswift --model "
        f"{model}`"
    )


def _import_draft(folder: Path, files: ModelFiles, output: Path) -> Path:
    """Write a draft model's folder, with its weights as safetensors."""
    source = locate_model(str(DRAFT_MODEL.find(files.name, files.path, files.fingerprint, folder)))
    if source.max_positions < (longest := TriForceOptions().draft_length):
        raise ModelError(f"{folder}: it has {source.max_positions} positions; the engine needs {longest}")
    if any(file.suffix == SUFFIX for file in weight_files(source.path)):
        raise ModelError(f"{folder}: its weights are a GGUF file, which is used as it is; name it with --draft-model")
    file = _free(output / SINGLE_FILE)
    tensors = {name: each.clone().contiguous() for name, each in _tensors(source.path).items()}
    header = {"format": "pt", FINGERPRINT: files.fingerprint, ORIGIN: _origin("draft", source.path)}
    save_file(tensors, file, metadata=header)
    let_others_read(file)
    copy_small_files(source.path, output)
    return file


def _import_layer(kind: str, folder: Path, files: ModelFiles, output: Path) -> Path:
    """Write the layer of EAGLE, EAGLE-2, HASS or GRIFFIN for the engine `griffin`, which computes the same."""
    tensors = _tensors(folder)
    if other := next((name for name in sorted(tensors) if name.startswith(OF_EAGLE_3)), None):
        raise ModelError(f"{folder}: it has {other}, so it is EAGLE-3's, which reads three of the model's layers")
    embedding, config = tensors.pop(TOKENS, None), _config(kind, folder, tensors)
    _refuse_other_model(folder, embedding, config.hidden_size, files)
    model = GriffinModel(config)
    model.load_state_dict(_checked(kind, folder, tensors, model))
    file = _free(output / GRIFFIN_FILE)
    save_griffin(output, model, files.fingerprint, _origin(kind, folder))
    return file


def _checked(kind: str, folder: Path, tensors: dict[str, Tensor], model: GriffinModel) -> dict[str, Tensor]:
    """Return a layer's tensors by our names. Raises ModelError for other tensors or shapes than published ones.

    Absent biases become zeros. Published layers join a token's embedding in front of the feature, ours behind it.
    """
    names = {_their_name(name, kind): name for name in model.state_dict()}
    shapes: dict[str, Shape] = {name: tuple(model.state_dict()[ours].shape) for name, ours in names.items()}
    absent = {name: torch.zeros(model.config.hidden_size) for name, ours in names.items() if ours in OPTIONAL}
    part = ReadPart({}, absent | tensors, f"{folder}", f"expected a layer that {kind.upper()}'s authors publish")
    found = {names[name]: each for name, each in part.checked(shapes).items()}
    return found | {FUSE: found[FUSE].roll(model.config.hidden_size, dims=1)}


def _their_name(name: str, kind: str) -> str:
    """Return the published name of one of our tensors."""
    theirs = {"layer.": LAYER} | NAMES[kind]
    ours = next(each for each in theirs if name.startswith(each))
    return theirs[ours] + name.removeprefix(ours)


def _config(kind: str, folder: Path, tensors: Mapping[str, Tensor]) -> GriffinConfig:
    said, fault = json_object(folder / "config.json")
    if fault:
        raise ModelError(fault)
    for key, expected in (("hidden_act", "silu"), ("rope_scaling", None)):
        if (found := said.get(key, expected)) != expected:
            raise ModelError(f"{folder}: config.json has {key} = {found!r:.80}; expected {json.dumps(expected)}")
    try:
        config = _sizes({"rms_norm_eps": EPSILON, "rope_theta": THETA} | said)
    except KeyError as error:
        raise ModelError(f"{folder}: config.json has no {error.args[0]}; copy the folder again") from None
    except ValueError as error:
        raise ModelError(f"{folder}: {error}; expected the sizes of a layer") from None
    config = replace(config, has_input_norm=INPUT_NORM in tensors, has_attention_bias=QUERY_BIAS in tensors)
    if kind == "griffin":
        return replace(config, is_published=True, fusion="token", expansion_size=config.intermediate_size)
    return config


def _sizes(said: Config) -> GriffinConfig:
    """Read a layer's sizes. Raises KeyError or ValueError."""
    hidden, num_heads = SIZE.of(said, "hidden_size"), SIZE.of(said, "num_attention_heads")
    if hidden % num_heads or hidden // num_heads % 2:
        raise ValueError(f"its hidden_size is {hidden} for {num_heads} heads")
    keys: dict[str, Any] = {"num_key_value_heads": said.get("num_key_value_heads") or num_heads}
    return GriffinConfig(
        hidden_size=hidden,
        intermediate_size=SIZE.of(said, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=SIZE.of(keys, "num_key_value_heads"),
        head_dim=hidden // num_heads,
        expansion_size=0,
        fusion="none",
        has_token_enhanced_head=False,
        epsilon=float(POSITIVE.of(said, "rms_norm_eps")),
        rope_theta=float(BASE.of(said, "rope_theta")),
    )


def _refuse_other_model(folder: Path, embedding: Tensor | None, hidden: int, files: ModelFiles) -> None:
    """Raise ModelError unless a layer's width, and its copy of the embedding, are those of the model."""
    width, expected = read_config(files.name, files.path).get("hidden_size"), _embedding_of(files)
    if hidden != width:
        raise ModelError(f"{folder}: it reads features of {hidden:,} numbers, and {files.name} has {width:,}")
    if embedding is None or expected is None:
        return
    same = embedding.shape == expected.shape
    if not same or float((embedding.float() - expected).norm()) > MOST_DISTANCE * float(expected.norm()):
        raise ModelError(f"{folder}: its {TOKENS} is not that of {files.name}; name the model that it was made for")


def _embedding_of(files: ModelFiles) -> Tensor | None:
    """Return a model's embedding in float32; None if it is quantized."""
    names = stored_layout(files.name, files.path).names
    for file in weight_files(files.path):
        for name, tensor in () if file.suffix == SUFFIX else stored_tensors(file):
            if names.get(name) == EMBEDDING:
                return tensor.float()
    return None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return a part's tensors. Raises ModelError for a folder without weights, or with damaged ones."""
    if not (files := weight_files(folder)):
        raise ModelError(f"{folder}: no {SINGLE_FILE} or {PICKLED_FILE}; expected a part as its authors publish it")
    try:
        for file in files:
            heads_in(file)  # says what is wrong with it
    except FormatError as error:
        raise ModelError(str(error)) from None
    stored = (pair for file in files for pair in stored_tensors(file))
    return {name: each for name, each in stored if not name.endswith(OLD_ANGLES)}


def _free(file: Path) -> Path:
    if file.exists():
        raise ModelError(f"output {file}: found something there already; name another folder")
    return file


def _origin(kind: str, folder: Path) -> str:
    return f"{kind} of {folder.resolve().name}, fingerprint {digests_of(folder).fingerprint}"
