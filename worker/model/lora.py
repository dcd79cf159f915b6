"""LoRA adapters in PEFT's published form: their files, and which of a model's weights they change. Without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import at_commit
from swiftbatch.worker.model.architectures.moe_layers import ROLES
from swiftbatch.worker.model.architectures.spec import ATTENTION
from swiftbatch.worker.model.bucket import Bucket, is_in_bucket
from swiftbatch.worker.model.config_values import Config, shown
from swiftbatch.worker.model.decoder_config import DecoderConfig, OtherDecoderError, read_decoder_config
from swiftbatch.worker.model.digests import fingerprint_of
from swiftbatch.worker.model.file_checks import ADAPTER_FILE, json_object
from swiftbatch.worker.model.formats.contract import FormatError, StoredTensor
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.hub import HubName, commit_of, hub_snapshot
from swiftbatch.worker.model.text_config import text_name

WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (ADAPTER_FILE, WEIGHTS_FILE)
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_RANK = 256
STORED = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)\.weight")
FLOATS = ("BF16", "F16", "F32")
READ = {"r", "lora_alpha", "target_modules", "layers_to_transform", "use_rslora", "rank_pattern", "alpha_pattern"}
ABOUT_TRAINING = {  # keys of its config that do not change what a trained adapter computes
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
    *("lora_dropout", "peft_version", "revision", "runtime_config", "task_type", "ensure_weight_tying"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core"),
    "qalora_group_size",
}
ONE_MEANING: dict[str, tuple[Any, ...]] = {  # the values at which these keys change nothing
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base model
}
PATTERNS = ("rank_pattern", "alpha_pattern")
MATCHER = """import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
patterns, modules = json.load(sys.stdin)
json.dump({each: [module for module in modules if re.fullmatch(each, module)] for each in patterns}, sys.stdout)
"""  # a process of its own, since an expression may take years and Python cannot interrupt it
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # of keys that are not known


@dataclass(frozen=True)
class LoraFiles:
    """An adapter's folder, and the SHA-256 of its files."""

    name: str
    path: Path
    digests: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.digests)

    @property
    def commit(self) -> str | None:
        """Return the commit of an adapter on the hub."""
        return commit_of(self.path)

    def fault(self, problem: str) -> ModelError:
        return ModelError(f"adapter {self.name}: {problem}")


@dataclass(frozen=True)
class AdaptedLinear:
    """One linear layer that an adapter changes: the stored names of `down` and `up`, and the factor of their product.

    The roles of a decoder's weights that are stored together share it.
    """

    layer: int
    name: str
    roles: tuple[str, ...]
    down: str
    up: str
    rank: int
    scale: float


def parse_lora(said: str) -> tuple[str, str]:
    """Split NAME=PLACE. Raises ValueError."""
    name, equals, place = said.partition("=")
    if not equals or not NAME.fullmatch(name) or not place:
        raise ValueError(
            f"found {said!a:.80}, expected NAME=FOLDER or NAME=ORG/ADAPTER, with a name of up to 64 letters, digits, "
            "'.', '_' and '-'"
        )
    return name, place


def with_absolute_places(said: Sequence[str]) -> tuple[str, ...]:
    """Return NAME=PLACE texts sorted, with absolute folders. Raises ModelError for a name given twice."""
    pairs = sorted(map(parse_lora, said))
    for (name, _), (other, _) in pairwise(pairs):
        if name == other:
            raise ModelError(f"--lora: found {name} twice, expected a name of its own for each adapter")
    return tuple(f"{name}={os.path.abspath(place) if os.path.isdir(place) else place}" for name, place in pairs)


def locate_loras(said: Sequence[str], commits: Mapping[str, str]) -> list[LoraFiles]:
    """Find adapters in folders, on the hub at their `commits` by name, or in object stores. Raises ModelError."""
    return [_located(name, at_commit(place, commits.get(name))) for name, place in map(parse_lora, said)]


def _located(name: str, place: str) -> LoraFiles:
    path = Path(place)
    if not os.path.isdir(place):
        if not is_in_bucket(place) and (place.startswith((".", "/", "~")) or HubName.of(place).name.count("/") != 1):
            raise ModelError(
                f"adapter {name}: {place:.200} is no folder here, nor one in a bucket (s3://, gs://, az://), nor "
                "ORG/ADAPTER on the hub; put it back, or correct --lora"
            )
        path = Bucket(place).folder(FILES) if is_in_bucket(place) else hub_snapshot(place, FILES)
    for file in FILES:
        if not (path / file).is_file():
            raise ModelError(
                f"adapter {name}: found no {file} in {path}, expected the files that PEFT saves: {' and '.join(FILES)}"
            )
    return LoraFiles(name, path, {file: hashlib.sha256((path / file).read_bytes()).hexdigest() for file in FILES})


def adapted_linears(files: LoraFiles, model_config: Config) -> list[AdaptedLinear]:
    """Return which linear layers of a model an adapter changes, by headers alone.

    Raises ModelError for an adapter that does not fit the model, or that our kernels do not run.
    """
    config, fault = json_object(files.path / ADAPTER_FILE)
    if fault or (fault := _config_fault(config)):
        raise files.fault(fault if fault.startswith(str(files.path)) else f"{files.path / ADAPTER_FILE}: {fault}")
    try:
        dense = read_decoder_config(model_config)
    except OtherDecoderError as error:
        raise files.fault(f"only our kernels run adapters, and they do not run this model: {error}") from None
    if dense.latent is not None:
        raise files.fault("the model has latent or compressed attention, whose products take no adapters yet")
    if dense.own_heads is not None or dense.shared_keys or dense.value_dim:
        raise files.fault("the model's layers have heads of several forms, whose products take no adapters yet")
    try:
        stored = heads_in(files.path / WEIGHTS_FILE)
        found = [*_adapted(stored, config, dense, model_config)]
    except FormatError as error:
        raise files.fault(str(error)) from None
    except ValueError as error:
        raise files.fault(f"{files.path / WEIGHTS_FILE}: {error}") from None
    if absent := _targets_without_weights(config, {each.down for each in found}):
        raise files.fault(f"{ADAPTER_FILE} has the target {absent[0]!r:.80}, and {WEIGHTS_FILE} has no weights of it")
    return found


def _config_fault(config: Mapping[str, Any]) -> str | None:
    for key, allowed in ONE_MEANING.items():
        if config.get(key, allowed[0]) not in allowed:
            return f"{key} is {config[key]!r:.80}, not supported; expected {' or '.join(map(repr, allowed))}"
    unknown = sorted({*config} - {*ONE_MEANING, *ABOUT_TRAINING, *READ})
    if said := [key for key in unknown if config[key] not in OFF]:
        return f"{shown(said[0])} is {config[said[0]]!r:.80}, not supported; expected plain LoRA of linear layers"
    if not _is_count(config.get("r")):
        return f"r is {config.get('r')!r:.80}, expected a rank from 1 to {MOST_RANK}"
    patterns = [config.get(key) or {} for key in PATTERNS]
    if not all(isinstance(each, dict) for each in patterns):
        return "rank_pattern or alpha_pattern is no object, expected one with a number for each name"
    if not all(map(_is_number, [config.get("lora_alpha"), *patterns[1].values()])):
        return "lora_alpha or a number of alpha_pattern is no number, expected numbers"
    if config.get("use_rslora") not in (None, True, False):
        return f"use_rslora is {config['use_rslora']!r:.80}, expected true or false"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def _adapted(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], dense: DecoderConfig, model_config: Config
) -> Iterator[AdaptedLinear]:
    """Yield the linear layers of all stored pairs. Raises ValueError for tensors that do not fit."""
    modules: dict[str, dict[str, str]] = {}
    for key in stored:
        if (named := STORED.fullmatch(key)) is None:
            raise ValueError(f"found the tensor {key!a:.120}, expected weights of LoRA in linear layers alone")
        modules.setdefault(named["module"], {})[named["part"]] = key
    if not modules:
        raise ValueError("found no weights, expected some")
    places, matched = dict[tuple[int, str], str](), _matched(config, modules)
    for module, parts in modules.items():
        if lacking := {"A", "B"} - {*parts}:
            raise ValueError(f"found {module!a:.120} without its lora_{lacking.pop()}.weight, expected both")
        layer, name, roles = _place(module, dense, model_config)
        if (other := places.setdefault((layer, name), module)) != module:
            raise ValueError(f"found {other!a:.120} and {module!a:.120}, expected one pair for each linear layer")
        if not _is_target(module, layer, config, matched):
            raise ValueError(f"found weights of {module!a:.120}, expected targets of {ADAPTER_FILE} alone")
        rank = _of_module(module, config, "r", PATTERNS[0], matched)
        if not _is_count(rank):
            raise ValueError(f"found the rank {rank!r:.80} of {module!a:.120}, expected one from 1 to {MOST_RANK}")
        _refuse_shape(parts["A"], stored, (rank, _depth(dense, layer, roles[0])))
        _refuse_shape(parts["B"], stored, (_num_columns(dense, layer, roles), rank))
        alpha = _of_module(module, config, "lora_alpha", PATTERNS[1], matched)
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        yield AdaptedLinear(layer, name, roles, parts["A"], parts["B"], rank, scale)


def _refuse_shape(key: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> None:
    found = stored[key]
    if found.shape != shape or found.dtype not in FLOATS:
        expected = f"expected {list(shape)} in {', '.join(FLOATS)}"
        raise ValueError(f"found {key!a:.120} as {found.dtype} {list(found.shape)}, {expected}")


def _place(module: str, dense: DecoderConfig, model_config: Config) -> tuple[int, str, tuple[str, ...]]:
    """Return layer, name and roles of a module. Raises ValueError if the kernels have no such product."""
    found = LAYER.fullmatch(text_name(f"{module}.weight", model_config) or "")
    if found is None or int(found[1]) >= dense.num_layers:
        raise ValueError(
            f"found weights of {module!a:.120}, expected linear layers in the model's {dense.num_layers} layers; those "
            "of embeddings, heads and towers are not supported"
        )
    layer, name = int(found[1]), found[2]
    roles = tuple(role for role, part in dense.linears(layer).items() if part == name)
    has_experts = dense.experts is not None and layer in dense.experts.layers
    if not roles or (has_experts and {*roles} & {*ROLES}):
        known = {part for role, part in dense.linears(layer).items() if role in ATTENTION or not has_experts}
        raise ValueError(
            f"found weights of {module!a:.120}, expected one of {', '.join(sorted(known)) or 'no linear layers'} in "
            f"layer {layer}: the kernels' other products take no adapters"
        )
    if layer in dense.own_layers and {*roles} & {*ATTENTION} and (dense.own_heads or dense.keys_are_values):
        raise ValueError(
            f"found weights of {module!a:.120}: the layer has heads of its own, which take no adapters yet"
        )
    return layer, name, roles


def _is_target(module: str, layer: int, config: Mapping[str, Any], matched: Mapping[str, Collection[str]]) -> bool:
    said, layers = config.get("target_modules"), config.get("layers_to_transform")
    if layers not in (None, []) and layer not in (layers if isinstance(layers, list) else [layers]):
        return False
    if isinstance(said, str):
        return said == "all-linear" or module in matched[said]
    return isinstance(said, list) and any(module == each or module.endswith(f".{each}") for each in said)


def _matched(config: Mapping[str, Any], modules: Collection[str]) -> dict[str, list[str]]:
    """Return the modules that each pattern of a config matches. Raises ValueError for patterns without an answer."""
    said = config.get("target_modules")
    patterns = [said] if isinstance(said, str) and said != "all-linear" else []
    patterns += [_behind_dots(each) for key in PATTERNS for each in config.get(key) or {}]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            raise ValueError(
                f"found the pattern {pattern!a:.120} in {ADAPTER_FILE}, expected a regular expression"
            ) from None
    if not patterns:
        return {}
    asked = json.dumps([patterns, [*modules]])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", MATCHER], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"found patterns in {ADAPTER_FILE} that take too long, expected simpler regular expressions")
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _behind_dots(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def _of_module(
    module: str, config: Mapping[str, Any], key: str, pattern_key: str, matched: Mapping[str, Collection[str]]
) -> Any:
    """Return a module's value of a key, by PEFT's rule: that of the first pattern that its name ends with."""
    patterns = config.get(pattern_key) or {}
    own = (value for pattern, value in patterns.items() if module in matched[_behind_dots(pattern)])
    return next(own, config[key])


def _targets_without_weights(config: Mapping[str, Any], stored: set[str]) -> list[Any]:
    said = config.get("target_modules")
    names = [STORED.fullmatch(key) for key in stored]
    modules = [found["module"] for found in names if found]
    targets = said if isinstance(said, list) else []
    return [each for each in targets if not any(f".{module}".endswith(f".{each}") for module in modules)]


def _depth(dense: DecoderConfig, layer: int, role: str) -> int:
    """Return how many numbers a weight reads from a row."""
    widths = {"output": dense.num_heads * dense.head_dim, "down": dense.mlp_widths[layer]}
    return widths.get(role, dense.hidden)


def _num_columns(dense: DecoderConfig, layer: int, roles: Sequence[str]) -> int:
    rows = {"output": dense.hidden, "down": dense.hidden} | dense.widths(layer)
    rows["query"] *= 2 if dense.form.gates_heads else 1
    return sum(rows[role] for role in roles)
