"""A model in GGUF files, and the folder that links to them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES, GGUF_KINDS
from swiftbatch.worker.model.architectures.spec import GGUFSpec
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.gguf.header import GGUFError, GGUFHead, TensorHead, read_head
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD

SUFFIX = ".gguf"
INDEX_FILE = "gguf.json"
WHOLE = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "output_norm.weight": "model.norm.weight"}
LAYER = {  # llama.cpp's name -> part; `GGUFSpec.names` adds more
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def link_names(folder: Path) -> list[str]:
    """Return the names of the links in a folder for GGUF files, or no names for any other folder."""
    try:
        said = _said(folder)
        names = [link_name(number, len(said["files"])) for number in range(len(said["files"]))]
        return names if names == said["files"] and said["architecture"] in GGUF_KINDS else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return []


def form_of_link(link: Path) -> GGUFSpec:
    return _form_of(_said(link.parent)["architecture"])


def _form_of(name: str) -> GGUFSpec:
    form = ARCHITECTURES[GGUF_KINDS[name]].gguf
    assert form is not None
    return form


def write_index(folder: Path, architecture: str, files: list[str]) -> None:
    said = {"architecture": architecture, "files": files}
    (folder / INDEX_FILE).write_text(json.dumps(said) + "\n", encoding="utf-8")


def link_name(number: int, count: int) -> str:
    """Return a link's name, which depends only on its index and the number of files."""
    return f"model{SUFFIX}" if count == 1 else f"model-{number + 1:05}-of-{count:05}{SUFFIX}"


def _said(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return said


# A model in one or several GGUF files, as their headers describe it.

SPLIT = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
IN_LAYER = re.compile(r"^blk\.(?P<number>0|[1-9]\d*)\.(?P<part>\w+)\.(?P<what>weight|bias)$")
FREQUENCIES = "rope_freqs.weight"  # the config already has these frequencies

TEXT = ("a text", lambda value: isinstance(value, str))
INTEGER = ("an integer", lambda value: type(value) is int)
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # keys that all architectures have
    "general.architecture": TEXT,
    "split.count": INTEGER,
    "split.no": INTEGER,
    "tokenizer.chat_template": TEXT,
    "tokenizer.ggml.merges": ("a list of texts", lambda value: isinstance(value, list)),
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.scores": ("a list of numbers", lambda value: isinstance(value, np.ndarray)),
    "tokenizer.ggml.tokens": ("a list of texts", lambda value: isinstance(value, list)),
    "tokenizer.ggml.token_type": ("a list of numbers", lambda value: isinstance(value, np.ndarray)),
}


@dataclass(frozen=True)
class GGUFModel:
    """The files of a model and their headers. The first file has the metadata."""

    files: tuple[Path, ...]
    heads: tuple[GGUFHead, ...]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.heads[0].metadata

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @cached_property
    def form(self) -> GGUFSpec:
        """Return how the architecture is stored. Raises GGUFError for an unsupported architecture."""
        if self.name not in GGUF_KINDS:
            known = ", ".join(GGUF_KINDS)
            raise GGUFError(f"its architecture {self.name!r:.80} is not read here; expected one of {known}")
        return _form_of(self.name)

    @cached_property
    def tensors(self) -> dict[str, TensorHead]:
        """Tensors by their names in GGUF. Raises GGUFError if a name occurs twice."""
        found: dict[str, TensorHead] = {}
        for head in self.heads:
            for tensor in head.tensors:
                if tensor.name in found:
                    raise GGUFError(f"it holds the tensor {tensor.name} twice")
                found[tensor.name] = tensor
        return found

    def floats(self, name: str) -> np.ndarray:
        """Read a small float32 tensor. Raises GGUFError for any other."""
        for file, head in zip(self.files, self.heads, strict=True):
            for tensor in head.tensors:
                if tensor.name == name and tensor.type.name == "F32":
                    return np.fromfile(file, "<f4", math.prod(tensor.shape), offset=head.num_bytes + tensor.offset)
        raise GGUFError(f"its tensor {name} is {self.tensors[name].type.name}, expected F32")


def read_gguf(file: Path) -> GGUFModel:
    """Read the headers of a model's files. Raises GGUFError."""
    files = tuple(_files(file))
    model = GGUFModel(files, tuple(_head(each) for each in files))
    for number, head in enumerate(model.heads):
        count, place = head.metadata.get("split.count", 1), head.metadata.get("split.no", 0)
        if (count or 1, place) != (len(files), number):
            raise GGUFError(
                f"{files[number]}: it says that it is part {place} of {count}, expected {number} of {len(files)}"
            )
    return model


def transformers_name(name: str, form: GGUFSpec) -> str:
    """Return a tensor's name in `transformers`, with "*" in place of an expert's index. Raises GGUFError."""
    if name in WHOLE:
        return WHOLE[name]
    parts, found = {**LAYER, **form.names}, IN_LAYER.match(name)
    if found is None or found["part"] not in parts:
        raise GGUFError(f"its tensor {name} has no place in a {form.name}")
    return f"model.layers.{found['number']}.{parts[found['part']]}.{found['what']}"


def _files(file: Path) -> Iterator[Path]:
    """Yield all files of a split model. Raises GGUFError if a file is missing."""
    said = SPLIT.match(file.name)
    if said is None:
        yield file
        return
    if not int(said["count"]):
        raise GGUFError("its name says that it is one part of none; rename it")
    if int(said["number"]) != 1:
        raise GGUFError(f"it is one part of several; give the first one, {said['stem']}-00001-of-{said['count']}.gguf")
    for number in range(1, int(said["count"]) + 1):
        part = file.with_name(f"{said['stem']}-{number:05}-of-{said['count']}.gguf")
        if not part.is_file():
            raise GGUFError(f"its part {part} is missing")
        yield part


def _head(file: Path) -> GGUFHead:
    try:
        head = read_head(file)
        _refuse_other_types(head.metadata)
    except GGUFError as error:
        raise GGUFError(f"{file}: {error}") from None
    return head


def _refuse_other_types(metadata: Mapping[str, Any]) -> None:
    for key, (words, holds) in TYPES.items():
        if key in metadata and not holds(metadata[key]):
            raise GGUFError(f"its metadata has {key} = {metadata[key]!r:.60}, expected {words}")


def num_experts_in(tensor: TensorHead) -> int:
    if len(tensor.shape) != 3:
        raise GGUFError(f"its tensor {tensor.name} has the shape {list(tensor.shape)}, expected three dimensions")
    return tensor.shape[0]


def stored_in_gguf(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a linked file, each expert on its own. Raises GGUFError."""
    for tensor in read_head(file).tensors:
        if tensor.name == FREQUENCIES:
            continue
        name, kind = transformers_name(tensor.name, form_of_link(file)), tensor.type
        if "*" not in name:
            yield name, StoredTensor(kind.name, tensor.shape, kind.packed)
            continue
        for number in range(num_experts_in(tensor)):
            yield name.replace("*", str(number)), StoredTensor(kind.name, tensor.shape[1:], kind.packed)
