"""The tensors in a model's files, by their names in the text model. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from swiftbatch.worker.model.config_values import line_of, shown
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.formats.catalogue import format_of
from swiftbatch.worker.model.formats.contract import UNUSED, Format, FormatError, Scheme, StoredTensor
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX, stored_in_gguf
from swiftbatch.worker.model.gguf.header import BITS, GGUFError
from swiftbatch.worker.model.text_config import text_name, text_view

FLOATS = ("BF16", "F16", "F32", "F64")
MOST_SAID = 300  # characters of an error's text
PLAIN = "weights in bfloat16, float16, float32 or float64"


@dataclass(frozen=True)
class PackedTensor:
    """A matrix that is stored in parts: the stored name of each part."""

    name: str  # the matrix's name in the text model
    scheme: Scheme
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """The tensors of a text model, and their packed parts."""

    format: Format | None
    heads: Mapping[str, StoredTensor]  # keys are names in the text model; a packed matrix has one entry
    packed: tuple[PackedTensor, ...]
    names: Mapping[str, str]  # stored name -> name, for plain tensors
    repeated: frozenset[str]  # stored names that occur more than once


def layout_in(path: Path, config: Mapping[str, Any]) -> Layout:
    """Return the layout of a model folder. Raises FormatError."""
    stored = [pair for file in weight_files(path) for pair in heads_in(file).items()]
    return layout_of(stored, config, format_of(text_view(config), path))


def heads_in(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a file. Raises FormatError, also if the file is truncated."""
    try:
        if file.suffix == SUFFIX:
            return dict(stored_in_gguf(file))
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            return {name: StoredTensor(str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()}
    except (OSError, SafetensorError, GGUFError) as error:
        raise FormatError(f"{file} is damaged or cut off ({line_of(error, MOST_SAID)}); copy it again") from None


def layout_of(stored: Iterable[tuple[str, StoredTensor]], config: Mapping[str, Any], format_: Format | None) -> Layout:
    """Return the layout of stored tensors. Raises FormatError for parts of a matrix that do not fit together."""
    view, pairs = text_view(config), list(stored)
    named = {name: head for name, head in pairs if text_name(name, view) and not (format_ and UNUSED.search(name))}
    packed = [] if format_ is None else list(_packed(named, format_, view))
    in_parts = {name for each, _ in packed for name in each.parts.values()}
    plain = {name: str(text_name(name, view)) for name in named if name not in in_parts}
    for name in plain:
        if name.endswith("weight") and named[name].dtype not in (*FLOATS, *BITS):  # in GGUF files, all supported types
            raise FormatError(f"its weights have {shown(name)} as {named[name].dtype}; expected {PLAIN}")
    if format_ is not None and named and not packed:
        raise FormatError(f"its weights are quantized in {format_.name}, says its config, and none of them is")
    heads = {known: named[name] for name, known in plain.items()} | {each.name: head for each, head in packed}
    repeated = frozenset(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
    return Layout(format_, heads, tuple(each for each, _ in packed), plain, repeated)


def _packed(
    named: Mapping[str, StoredTensor], format_: Format, view: dict[str, Any]
) -> Iterable[tuple[PackedTensor, StoredTensor]]:
    groups: dict[str, dict[str, str]] = {}
    for name in named:
        matrix, part = format_.place(name)
        groups.setdefault(matrix, {})[part] = name
    for matrix, parts in groups.items():
        heads = {part: named[name] for part, name in parts.items()}
        try:
            if (scheme := format_.scheme_of(matrix, heads)) is not None:
                head = StoredTensor(scheme.numbers, scheme.shape(heads), scheme.form(heads))
                yield PackedTensor(str(text_name(matrix, view)), scheme, parts), head
        except FormatError as error:
            raise FormatError(f"its weights have {shown(matrix)} in {format_.name}, and {error}") from None
