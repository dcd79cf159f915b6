"""Finds and identifies a model's files without loading them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.input.request_fields import LineFields
from swiftbatch.jobs.json_records import reasons
from swiftbatch.jobs.run.run_records import at_commit
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES, NESTED, what_it_lacks
from swiftbatch.worker.model.bucket import Bucket, is_in_bucket
from swiftbatch.worker.model.compute_path import shifting_rotary, without_kernels
from swiftbatch.worker.model.config_faults import config_fault, keys_fault, unsaid_fault
from swiftbatch.worker.model.digests import TEXT_FILES, Digests, digests_of, hub_digest, weight_files
from swiftbatch.worker.model.file_checks import (
    ADAPTER_FILE,
    ENTRIES,
    GENERATION_FILE,
    INDEX_FILE,
    PICKLED,
    PICKLED_INDEX,
    adapter_fault,
    folder_fault,
    json_object,
    weight_names,
    zero_tail_fault,
)
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import QUANTIZATION_FILE, Layout, format_of, layout_in
from swiftbatch.worker.model.gguf.gguf_folder import gguf_folder
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX
from swiftbatch.worker.model.hub import (
    PART,
    HubName,
    are_headers,
    commit_of,
    gguf_names,
    hub_file,
    hub_headers,
    hub_snapshot,
    refuse_absent,
)
from swiftbatch.worker.model.text_config import nested_config, text_view

CONFIG_FILES = ("config.json", ADAPTER_FILE, QUANTIZATION_FILE)  # a few KB that tell whether a model is supported
PARTS_FOLDER = "parts"  # subfolder of a model with engines' parts; a folder, since other programs read all weights
ALL_FILES = ("*.json", "*.safetensors", *TEXT_FILES)
SMALL_FILES = ("*.json", *TEXT_FILES, f"{PARTS_FOLDER}/*")  # all but weights
PICKLED_FILES = "pytorch_model*.bin"  # fetched where a model has no safetensors
EMBEDDED = Path(__file__).parent.parent / "embedded"
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields of a generation config
HEADS_FILE = "tokenswift_heads.safetensors"
GRIFFIN_FILE = "griffin.safetensors"
MTP_FILE = "mtp.safetensors"
DRAFT_FOLDER = "draft"  # a small model with the same vocabulary
LATER_PART = re.compile(
    r"-(?!00001)\d{5}-of-\d{5}\.gguf$|^mmproj", re.IGNORECASE
)  # later parts of a model, and image encoders
ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')  # found in a `tokenizer.json`


class OtherModelError(ModelError):
    """A file is not the expected one, so tokens could differ."""


@dataclass(frozen=True)
class ModelFiles:
    """A model folder with `config.json`, weights and a tokenizer."""

    name: str
    path: Path
    digests: Digests
    max_positions: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 over config, tokenizer and weights."""
        return self.digests.fingerprint

    @property
    def commit(self) -> str | None:
        return _commit(self.name, self.path)

    @property
    def text_fingerprint(self) -> str:
        """Return the SHA-256 over chat templates and all other files that affect the conversion of text to tokens."""
        return self.digests.text_fingerprint

    def refuse_other(self, expected: Mapping[str, str]) -> None:
        """Raise OtherModelError if a file's SHA-256 is not the expected one."""
        if different := self.digests.difference(expected):
            self._refuse(*different)

    def refuse_other_weights(self, name: str, found: str) -> None:
        """Raise OtherModelError if the SHA-256 of loaded weights is not that of `digests`."""
        if found == (expected := self.digests.model.get(name)):
            return
        file = self.path / name
        if expected is not None and expected == hub_digest(file):
            raise OtherModelError(
                f"model {self.name}: on node {socket.gethostname()} {file} is damaged: its source has SHA-256 "
                f"{expected[:12]}, found {found[:12]}; remove {file.resolve()} and give the command again"
            )
        self._refuse(name, found, expected)

    def _refuse(self, name: str, found: str | None, expected: str | None) -> None:
        is_found, is_expected = (f"SHA-256 {each[:12]}" if each else "no such file" for each in (found, expected))
        file = self.path / name
        file = file.readlink() if file.suffix == SUFFIX and file.is_symlink() else file
        raise OtherModelError(
            f"model {self.name}: on node {socket.gethostname()} {file} is not the file that was expected: "
            f"found {is_found}, expected {is_expected}; put the expected one there, or make another run"
        )


def locate_model(model: str, known_weights: Mapping[str, str] | None = None, is_whole: bool = True) -> ModelFiles:
    """Find `embedded`, a folder, or the snapshot of a hub id or of a folder in an object store. Raises ModelError.

    Weights whose SHA-256 is in `known_weights` or told by the hub are not hashed now, but checked when they are loaded.
    With `is_whole` false, only the headers of weights are fetched from the hub (see `headers_folder`).
    """
    small = model_folder(model, CONFIG_FILES)  # so that an unsupported model is not downloaded
    if fault := adapter_fault(small):
        raise ModelError(f"model {model}: {fault}")
    if refusal := what_refuses(read_whole_config(model, small), small):
        raise ModelError(f"model {model}: {refusal}")
    same = at_commit(model, _commit(model, small))  # the same commit, even if the hub has a newer one by now
    path = model_folder(same) if is_whole else headers_folder(same)
    config = read_config(model, path)
    if fault := folder_fault(path):
        raise ModelError(f"model {model}: {fault}")
    files = [] if are_headers(path) else weight_files(path)
    if fault := keys_fault(config, stored_layout(model, path).heads) or zero_tail_fault(files):
        raise ModelError(f"model {model}: {fault}")
    return ModelFiles(
        model, path, digests_of(path, known_weights), config["max_position_embeddings"], config["vocab_size"]
    )


def headers_folder(model: str) -> Path:
    """Return a model's folder, which has only the headers of weights that would have to be downloaded first.

    GGUF files, pickled weights and models in object stores are downloaded. Raises ModelError.
    """
    if model == "embedded" or Path(model).is_dir() or is_in_bucket(model) or gguf_of(model) is not None:
        return model_folder(model)
    snapshot = hub_snapshot(model, SMALL_FILES)
    names = weight_names(snapshot)
    if names and all((snapshot / name).is_file() for name in names):
        return snapshot
    try:
        return hub_headers(model, snapshot, names) or model_folder(model)
    except OSError as error:
        raise ModelError(f"model {model}: headers of its weights can't be kept ({error}); set XDG_CACHE_HOME") from None


def model_folder(model: str, wanted: Sequence[str] = ALL_FILES) -> Path:
    """Return a model's folder with the `wanted` files. Raises ModelError."""
    path = EMBEDDED if model == "embedded" else Path(model)
    if (file := gguf_of(model)) is not None:
        return gguf_folder(model, file, with_tokenizer=wanted == ALL_FILES)
    if path.is_dir():
        return path
    if is_in_bucket(model):
        return _bucket_folder(Bucket(model), wanted)
    snapshot = hub_snapshot(model, wanted)
    if wanted == ALL_FILES and not _has_safetensors(snapshot):
        snapshot = hub_snapshot(model, (*wanted, PICKLED_FILES))
    if wanted == ALL_FILES:
        weights = weight_names(snapshot)
        refuse_absent(model, weights, {name for name in weights if (snapshot / name).exists()})
    if not any((snapshot / name).is_file() for name in CONFIG_FILES) and (names := gguf_names(model, snapshot)):
        raise _which(model, names, ":")
    return snapshot


def _has_safetensors(path: Path) -> bool:
    names = weight_names(path)
    return bool(names) and not any(name.endswith(PICKLED) for name in names)


def gguf_of(model: str) -> Path | None:
    """Return the GGUF file that a model's name means; None for another kind of model. Raises ModelError."""
    if is_in_bucket(model):
        return _gguf_in(Bucket(model))
    path = Path(model)
    if model == "embedded" or (path.is_dir() and (path / "config.json").exists()):
        return None
    if path.is_dir():
        parts = [file for file in sorted(path.glob("*.gguf")) if not LATER_PART.search(file.name)]
        if len(parts) > 1:
            raise _which(model.rstrip("/"), [file.name for file in parts], "/")
        return parts[0] if parts else None
    if path.suffix == SUFFIX and path.is_file():
        return path
    file = HubName.of(model).file
    return None if file is None else hub_file(model, file)


def _bucket_folder(bucket: Bucket, wanted: Sequence[str]) -> Path:
    if not bucket.names(CONFIG_FILES):
        raise ModelError(f"model {bucket.model}: it has neither a config.json nor a .gguf file; correct --model")
    folder = bucket.folder(bucket.names(SMALL_FILES if wanted == ALL_FILES else wanted))
    return bucket.folder(weights_in(bucket, folder)) if wanted == ALL_FILES else folder


def weights_in(bucket: Bucket, folder: Path) -> list[str]:
    """Return the weight files of a model whose small files are in `folder`. Raises ModelError for an absent one."""
    entry = next((name for name in ENTRIES if name in bucket.objects), None)
    if entry is None:
        raise ModelError(
            f"model {bucket.model}: it has no model.safetensors or pytorch_model.bin, nor an index; other weights are "
            "not loaded"
        )
    names = sorted(weight_names(folder)) if entry in (INDEX_FILE, PICKLED_INDEX) else [entry]
    refuse_absent(bucket.model, names, bucket.objects)
    return names


def _gguf_in(bucket: Bucket) -> Path | None:
    parts = [name for name in bucket.names(("*.gguf",)) if "/" not in name and not LATER_PART.search(name)]
    file = bucket.file
    if file is None:
        if not parts or "config.json" in bucket.objects:
            return None
        if len(parts) > 1:
            raise _which(bucket.model.rstrip("/"), parts, "/")
        [file] = parts
    return bucket.folder(bucket.names([PART.sub("-*-of-", escape(file))])) / file


def _which(model: str, names: Sequence[str], joint: str) -> ModelError:
    found = f"found {'GGUF files' if len(names) > 1 else 'one GGUF file'} and no config.json: {', '.join(names)}"
    return ModelError(f"model {model}: {found}; name one of them, as in --model {model}{joint}{names[0]}")


def _commit(model: str, path: Path) -> str | None:
    """Return the commit of a model on the hub, whose folder may have a link to its GGUF file."""
    if model == "embedded" or Path(model).exists():
        return None
    links = [file.readlink() for file in sorted(path.glob("*.gguf")) if file.is_symlink()]
    return commit_of(path) or (commit_of(links[0]) if links else None)


def stored_layout(model: str, path: Path) -> Layout:
    """Return the layout of a model's stored tensors. Raises ModelError for damaged weights."""
    try:
        return layout_in(path, read_whole_config(model, path))
    except FormatError as error:
        raise ModelError(f"model {model}: {error}") from None


def what_refuses(config: dict[str, Any], path: Path) -> str | None:
    """Return which layer or format of a config is not supported, or None if all are."""
    view, whole = text_view(config), config.get("model_type")
    fault = config_fault(view)
    has_sense = fault is None or view["model_type"] not in ARCHITECTURES  # else what else it says may have none
    lack = what_it_lacks(view) or shifting_rotary(view) if has_sense else None
    if lack is None and nested_config(config) and str(whole) not in NESTED:
        lack = f"its kind {whole!r:.80} was not compared with transformers' own forward"
    fault = fault or _format_fault(view, path)
    if lack is None:
        return fault or unsaid_fault(view) or without_kernels(view)
    return f"{lack}{f'; {fault}' if fault else ''}; kinds that run here: {', '.join(ARCHITECTURES)}"


def _format_fault(config: dict[str, Any], path: Path) -> str | None:
    try:
        format_of(config, path)
    except FormatError as error:
        return str(error)
    return None


def read_config(model: str, path: Path) -> dict[str, Any]:
    """Read the text model's part of a `config.json`. Raises ModelError if the file is missing or invalid."""
    return text_view(read_whole_config(model, path))


def read_whole_config(model: str, path: Path) -> dict[str, Any]:
    """Read a published `config.json`. Raises ModelError if the file is missing or invalid."""
    config, fault = json_object(path / "config.json")
    if fault:
        raise ModelError(f"model {model}: {fault}")
    return config


def let_others_read(path: Path) -> None:
    """Let others read a file or folder, since safetensors and `tempfile` give access only to the owner."""
    os.umask(umask := os.umask(0))
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def sampling_defaults_of(files: ModelFiles) -> dict[str, Any]:
    """Return the sampling fields that the model's publisher recommends, those that vLLM takes. Raises ModelError."""
    said = _values_in(files.path / GENERATION_FILE)
    found = {name: said[name] for name in RECOMMENDED if said.get(name) is not None}
    try:
        fields = LineFields.model_validate(found)
    except ValidationError as error:
        raise ModelError(
            f"model {files.name}: {files.path / GENERATION_FILE}: {reasons(error, LineFields)}; mend it, or use "
            "--sampling-defaults openai"
        ) from None
    return {name: getattr(fields, name) for name in found}


def eos_token_ids_of(files: ModelFiles) -> frozenset[int]:
    """Return the tokens that end a text, by vLLM's rules. A fine-tune may name them only in its tokenizer."""
    said = _values_in(files.path / GENERATION_FILE).get("eos_token_id")
    eos = read_config(files.name, files.path).get("eos_token_id") if said is None else said
    found = [*(eos if isinstance(eos, list) else [eos]), _eos_of_tokenizer(files.path)]
    return frozenset(each for each in found if each is not None and 0 <= each < files.vocab_size)


def _eos_of_tokenizer(path: Path) -> int | None:
    config = _values_in(path / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else _values_in(path / "special_tokens_map.json")
    said = older.get("eos_token", config.get("eos_token"))
    name = said.get("content") if isinstance(said, dict) else said
    return next((known[name] for known in _known_tokens(path, config) if name in known), None) if name else None


def _known_tokens(path: Path, config: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yield token ids by text from several files, short ones first."""
    yield {each["content"]: int(number) for number, each in config.get("added_tokens_decoder", {}).items()}
    text = (path / "tokenizer.json").read_text(encoding="utf-8") if (path / "tokenizer.json").is_file() else "{}"
    if found := ADDED_TOKENS.search(text):
        yield {each["content"]: each["id"] for each in json.JSONDecoder().raw_decode(text, found.end())[0]}
    yield _values_in(path / "added_tokens.json")
    yield _values_in(path / "vocab.json")
    pieces = json.loads(text).get("model", {}).get("vocab", {})
    yield pieces if isinstance(pieces, dict) else {each[0]: number for number, each in enumerate(pieces)}


def _values_in(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
