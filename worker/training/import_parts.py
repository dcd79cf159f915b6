"""Draft parts that others trained and published, written as this project's parts: `swiftbatch train import`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import DRAFT_MODEL, FINGERPRINT, ORIGIN, ReadPart, Shape
from swiftbatch.worker.drafters.engine_options import TriForceOptions
from swiftbatch.worker.drafters.griffin.block_model import BlockConfig, BlockModel
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.config_values import BASE, COUNT, LAYERS, POSITIVE, SIZE, Config
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
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, OLD_ANGLES
from swiftbatch.worker.model.weight_files import stored_tensors
from swiftbatch.worker.quantizing import copy_small_files
from swiftbatch.worker.training.data_parallel import Report
from swiftbatch.worker.training.training_folder import held

EPSILON, THETA = 1e-6, 10_000.0  # what the configs of EAGLE and GRIFFIN default to
MOST_DISTANCE = 0.01  # of two embeddings that differ in rounding alone, relative to their norm
TOKENS, LAYER, LAYER_3 = "embed_tokens.weight", "layers.0.", "midlayer."
INPUT_NORM, QUERY_BIAS = "input_layernorm.weight", "self_attn.q_proj.bias"
FUSE = "fusion.fuse.weight"
OPTIONAL = ("fusion.fuse.bias", "layer.self_attn.o_proj.bias")  # our tensors that a published layer may lack
NAMES = {  # beginnings of our names, and published ones
    "eagle": {"layer.": LAYER, "fusion.fuse.": "fc."},
    "eagle3": {
        "layer.": LAYER_3,
        "projection.": "fc.",
        "head.norm.": "norm.",
        "head.tokens.": "lm_head.",
        "head.is_drafted": "t2d",
    },
    "dflash": {"projection.": "fc.", "": ""},
    "griffin": {
        "layer.": LAYER,
        "fusion.fuse.": "fc.fc.",
        "fusion.first_norm.": "fc.post_attention_layernorm.",
        "fusion.norm.": "fc.mlp.input_layernorm.",
        "fusion.up.": "fc.mlp.up_proj.",
        "fusion.down.": "fc.mlp.down_proj.",
    },
}
COPIES = dict.fromkeys(NAMES, (TOKENS,)) | {"dflash": (TOKENS, HEAD)}  # tensors that are the target's own
CONFIDENCE = "confidence_head."  # of DSpark: our planner decides how much of a block pays
DFLASH, DSPARK = ["DFlashDraftModel"], ["Qwen3DSparkModel"]
OF_EAGLE_3 = ("d2t", LAYER_3)  # names that begin so
PLAIN = {"hidden_act": "silu", "rope_scaling": None}  # keys of a config, and their only values that we compute
PLAIN_3 = PLAIN | {"num_hidden_layers": 1, "logit_scale": 1.0}
PLAIN_3 |= dict.fromkeys(("norm_before_residual", "fc_norm", "norm_output"), False)
PLAIN_BLOCK = PLAIN | {"use_sliding_window": False, "markov_head_type": "vanilla"}
MOST_BLOCK = 64  # tokens of a block; published ones have 16 or fewer
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
NOT_OURS: dict[str, Any] = {"expansion_size": 0, "fusion": "none", "has_token_enhanced_head": False}
HEADS = "medusa_layers.0.linear.weight"  # TokenSwift's name of its first head


def import_part(kind: str, folder: Path, model: str, output: Path, report: Report) -> None:
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
    TargetModel.load(source, "float32", "cpu")  # refuses tensors that are missing, too many, of other shapes or NaN
    tensors = {name: each.clone().contiguous() for name, each in _tensors(source.path).items()}
    header = {"format": "pt", FINGERPRINT: files.fingerprint, ORIGIN: _origin("draft", source.path)}
    save_file(tensors, file, metadata=header)
    let_others_read(file)
    copy_small_files(source.path, output)
    return file


def _import_layer(kind: str, folder: Path, files: ModelFiles, output: Path) -> Path:
    """Write the layer of EAGLE, EAGLE-2, EAGLE-3, HASS or GRIFFIN for the engine `griffin`, which computes the same."""
    tensors = _tensors(folder)
    if kind != "eagle3" and (other := next((name for name in sorted(tensors) if name.startswith(OF_EAGLE_3)), None)):
        raise ModelError(f"{folder}: it has {other}, so it is EAGLE-3's; import it as `eagle3`")
    copies = {name: tensors.pop(name) for name in COPIES[kind] if name in tensors}
    config: GriffinConfig | BlockConfig
    if kind == "dflash":
        config = _block_config(folder, tensors, files)
        tensors = {name: each for name, each in tensors.items() if not name.startswith(CONFIDENCE)}
    elif kind == "eagle3":
        config = _config_3(folder, tensors, files)
        tensors = _in_target_order(folder, tensors, config)
    else:
        config = _config(kind, folder, tensors)
    _refuse_other_model(folder, copies, config.hidden_size, files)
    with torch.device("meta"):  # a wrong config may say sizes that no memory holds
        expected = _model_of(config)
    checked = _checked(kind, folder, tensors, expected)
    model = _model_of(config)
    model.load_state_dict(checked)
    for name, each in model.state_dict().items():
        if not each.bfloat16().isfinite().all():
            raise ModelError(f"{folder}: {_their_name(name, kind)} has numbers that bfloat16 does not hold")
    file = _free(output / GRIFFIN_FILE)
    save_griffin(output, model, files.fingerprint, _origin(kind, folder))
    return file


def _model_of(config: GriffinConfig | BlockConfig) -> GriffinModel | BlockModel:
    return BlockModel(config) if isinstance(config, BlockConfig) else GriffinModel(config)


def _checked(
    kind: str, folder: Path, tensors: dict[str, Tensor], model: GriffinModel | BlockModel
) -> dict[str, Tensor]:
    """Return a layer's tensors by our names. Raises ModelError for other tensors or shapes than published ones.

    Absent biases become zeros. Published layers join a token's embedding in front of the feature, ours behind it.
    """
    names = {_their_name(name, kind): name for name in model.state_dict()}
    shapes: dict[str, Shape] = {name: tuple(model.state_dict()[ours].shape) for name, ours in names.items()}
    absent = {name: torch.zeros(model.config.hidden_size) for name, ours in names.items() if ours in OPTIONAL}
    part = ReadPart({}, absent | tensors, f"{folder}", f"expected a layer that {kind.upper()}'s authors publish")
    found = {names[name]: each for name, each in part.checked(shapes).items()}
    if FUSE in found:
        found[FUSE] = found[FUSE].roll(model.config.hidden_size, dims=1)
    return found


def _their_name(name: str, kind: str) -> str:
    """Return the published name of one of our tensors."""
    theirs = NAMES[kind]
    ours = next(each for each in theirs if name.startswith(each))
    return theirs[ours] + name.removeprefix(ours)


def _config(kind: str, folder: Path, tensors: Mapping[str, Tensor]) -> GriffinConfig:
    with _said_by(folder, PLAIN) as said:
        sizes = _sizes(said) | {"has_attention_bias": LAYER + QUERY_BIAS in tensors}
    config = GriffinConfig(**sizes, **NOT_OURS, has_input_norm=LAYER + INPUT_NORM in tensors)
    if kind == "griffin":
        return replace(config, is_published=True, fusion="token", expansion_size=config.intermediate_size)
    return config


def _config_3(folder: Path, tensors: Mapping[str, Tensor], files: ModelFiles) -> GriffinConfig:
    of_target = read_config(files.name, files.path)
    plain = PLAIN_3 | {"vocab_size": files.vocab_size, "target_hidden_size": of_target["hidden_size"]}
    with _said_by(folder, plain) as said:
        sizes = _sizes(said) | {"has_attention_bias": LAYER_3 + QUERY_BIAS in tensors}
        draft = SIZE.of({"draft_vocab_size": said.get("draft_vocab_size") or files.vocab_size}, "draft_vocab_size")
        layers = _layers_read(said, LAYERS.of(of_target, "num_hidden_layers"))
    return GriffinConfig(
        **sizes, **NOT_OURS, feature_layers=layers, vocab_size=files.vocab_size, draft_vocab_size=draft
    )


def _block_config(folder: Path, tensors: Mapping[str, Tensor], files: ModelFiles) -> BlockConfig:
    """Read the config of DFlash as z-lab publishes it, or of DFlash and DSpark as DeepSpec does."""
    num_layers = LAYERS.of(read_config(files.name, files.path), "num_hidden_layers")
    with _said_by(folder, PLAIN_BLOCK | {"vocab_size": files.vocab_size, "num_target_layers": num_layers}) as said:
        if (form := said["architectures"]) not in (DFLASH, DSPARK):
            raise ValueError(f"its architectures are {form!r:.80}, and we compute {DFLASH} and {DSPARK}")
        given = said["dflash_config"] if form == DFLASH else said
        if not isinstance(given, dict):
            raise ValueError(f"its dflash_config is {given!r:.80}")
        if form == DFLASH and (other := sorted({*given} - {"mask_token_id", "target_layer_ids"})):
            raise ValueError(f"its dflash_config has {', '.join(other):.80}")
        types = said.get("layer_types") or []
        if not isinstance(types, list) or any(each != "full_attention" for each in types):
            raise ValueError(f"its layer_types are {types!r:.80}")
        mask, size = COUNT.of(given, "mask_token_id"), SIZE.of(said, "block_size")
        if mask >= files.vocab_size or not 2 <= size <= MOST_BLOCK:
            raise ValueError(f"its mask_token_id is {mask:,} of {files.vocab_size:,} tokens, in blocks of {size}")
        return BlockConfig(
            **_sizes(said),
            has_attention_bias=LAYER + QUERY_BIAS in tensors,
            feature_layers=layers_within("target_layer_ids", given["target_layer_ids"], num_layers),
            num_layers=LAYERS.of(said, "num_hidden_layers"),
            block_size=size,
            mask_token_id=mask,
            num_silent=int(form == DFLASH),
            vocab_size=files.vocab_size,
            bigram_rank=COUNT.of({"markov_rank": 0, **said}, "markov_rank"),
        )


def _layers_read(said: Config, num_layers: int) -> tuple[int, ...]:
    """Read which of the target's layers EAGLE-3 reads the outputs of. Raises ValueError."""
    if said.get(LAYERS_READ) is not None:
        raise ValueError(f"its {LAYERS_READ} are not in eagle_config, and such numbers are counted in several ways")
    given = said.get("eagle_config") or {}
    if not isinstance(given, dict) or given.get("use_aux_hidden_state") not in (None, True):
        raise ValueError(f"its eagle_config is {given!r:.80}")
    layers = given.get(LAYERS_READ)
    return layers_within(
        LAYERS_READ, [1, num_layers // 2 - 1, num_layers - 4] if layers is None else layers, num_layers
    )


def layers_within(key: str, layers: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(layers, list) or not all(type(each) is int and 0 <= each < num_layers for each in layers):
        raise ValueError(f"its {key} are {layers!r:.80} of a model with {num_layers} layers")
    return tuple(layers)


def _in_target_order(folder: Path, tensors: dict[str, Tensor], config: GriffinConfig) -> dict[str, Tensor]:
    """Return EAGLE-3's tensors with `t2d` as floats, and the rows of its head in the order of the target's tokens."""
    kept = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}
    expected = f"expected integers [{config.draft_vocab_size}]"
    if (moves := tensors.get("d2t")) is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelError(f"{folder}: `d2t` is missing; {expected}")
        moves = torch.zeros(config.vocab_size, dtype=torch.int64)
    if moves.dtype not in (torch.int32, torch.int64) or moves.shape != (config.draft_vocab_size,):
        raise ModelError(f"{folder}: `d2t` is {moves.dtype} {list(moves.shape)}; {expected}")
    ids = torch.arange(len(moves)) + moves.long()
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ModelError(f"{folder}: `d2t` does not name {len(ids):,} of the model's {config.vocab_size:,} tokens")
    drafted = torch.zeros(config.vocab_size)
    drafted[ids] = 1
    if "t2d" in tensors and not torch.equal(tensors["t2d"].float(), drafted):
        raise ModelError(f"{folder}: `t2d` names other tokens than `d2t`; copy the folder again")
    if (head := kept.get("lm_head.weight")) is not None and len(head) == len(ids):
        kept["lm_head.weight"] = head[ids.argsort()]
    return kept | {"t2d": drafted}


@contextlib.contextmanager
def _said_by(folder: Path, plain: Mapping[str, Any]) -> Iterator[Config]:
    """Read a config. Raises ModelError for other values than the `plain` ones, and for what the caller misses in it."""
    said, fault = json_object(folder / "config.json")
    if fault:
        raise ModelError(fault)
    rope = said.get("rope_parameters")
    if isinstance(rope, dict):  # as later versions of transformers write it
        said = {"rope_theta": rope.get("rope_theta", THETA)} | said
        said |= {} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    for key, expected in plain.items():
        if (found := said.get(key)) not in (None, expected):
            raise ModelError(f"{folder}: config.json has {key} = {found!r:.80}; expected {json.dumps(expected)}")
    try:
        yield {"rms_norm_eps": EPSILON, "rope_theta": THETA} | said
    except KeyError as error:
        raise ModelError(f"{folder}: config.json has no {error.args[0]}; copy the folder again") from None
    except ValueError as error:
        raise ModelError(f"{folder}: {error}; expected the sizes of a layer") from None


def _sizes(said: Config) -> dict[str, Any]:
    """Read the fields of a `LayerConfig`. Raises KeyError or ValueError."""
    hidden, num_heads = SIZE.of(said, "hidden_size"), SIZE.of(said, "num_attention_heads")
    if said.get("head_dim") is None and hidden % num_heads:
        raise ValueError(f"its hidden_size is {hidden} for {num_heads} heads")
    found = {"num_key_value_heads": said.get("num_key_value_heads") or num_heads}
    found["head_dim"] = said.get("head_dim") or hidden // num_heads
    num_kv_heads, head_dim = SIZE.of(found, "num_key_value_heads"), SIZE.of(found, "head_dim")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"its {num_heads} heads have {num_kv_heads} of keys, each of {head_dim} numbers")
    return {
        "hidden_size": hidden,
        "intermediate_size": SIZE.of(said, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "epsilon": float(POSITIVE.of(said, "rms_norm_eps")),
        "rope_theta": float(BASE.of(said, "rope_theta")),
    }


def _refuse_other_model(folder: Path, copies: Mapping[str, Tensor], hidden: int, files: ModelFiles) -> None:
    """Raise ModelError unless a layer's width, and its copies of embedding and head, are those of the model."""
    of_model = read_config(files.name, files.path)
    if hidden != (width := of_model.get("hidden_size")):
        raise ModelError(f"{folder}: it reads features of {hidden:,} numbers, and {files.name} has {width:,}")
    for name, copy in copies.items():
        is_tied = name == TOKENS or of_model.get("tie_word_embeddings")
        if (expected := _stored(files, EMBEDDING if is_tied else HEAD)) is None:
            continue
        same = copy.shape == expected.shape
        if not same or not float((copy.float() - expected).norm()) <= MOST_DISTANCE * float(expected.norm()):  # NaN
            raise ModelError(f"{folder}: its {name} is not that of {files.name}; name the model that it was made for")


def _stored(files: ModelFiles, wanted: str) -> Tensor | None:
    """Return a model's tensor in float32; None if it is quantized."""
    names = stored_layout(files.name, files.path).names
    for file in weight_files(files.path):
        for name, tensor in () if file.suffix == SUFFIX else stored_tensors(file):
            if names.get(name) == wanted:
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
