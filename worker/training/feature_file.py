"""Target's features along texts in one Arrow IPC file, written once and then memory-mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.progress import track
from torch.utils.dlpack import from_dlpack

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.training_texts import CorpusError, Text, hidden_states

ORIGIN, TEXTS = b"origin", b"texts"  # keys of JSON in the schema's metadata
TOKEN_IDS, FEATURES = "token_ids", "features"


@dataclass(frozen=True)
class TextFeatures:
    """One text with the target's features, as views of the file."""

    name: str  # name of a group of texts
    first_row: int  # rows before this one are a prompt
    token_ids: torch.Tensor  # [num_tokens] uint32
    features: torch.Tensor  # [num_tokens, hidden] bfloat16: the target's final hidden states


def write_features(path: Path, target: TargetModel, texts: dict[str, list[Text]], origin: dict[str, Any]) -> None:
    """Run the target over named texts and write its features, one record batch per text.

    The file is written atomically.
    """
    size = target.model.config.hidden_size
    listed = [(name, text) for name, part in texts.items() for text in part]
    heads = [{"name": name, "first_row": text.first_row} for name, text in listed]
    fields = [(TOKEN_IDS, pa.uint32()), (FEATURES, pa.list_(pa.uint16(), size))]  # Arrow has no bfloat16
    schema = pa.schema(fields, metadata={ORIGIN: json.dumps(origin), TEXTS: json.dumps(heads)})
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for _, text in track(listed, f"features, {path.stem}", transient=True):
            writer.write_batch(_batch(text.token_ids, hidden_states(target, text.token_ids), schema))
    os.replace(aside, path)


def _batch(token_ids: list[int], hidden: torch.Tensor, schema: Any) -> Any:
    bits = hidden.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).flatten().numpy()
    features = pa.FixedSizeListArray.from_arrays(pa.array(bits), hidden.shape[1])
    return pa.record_batch([pa.array(np.asarray(token_ids, dtype=np.uint32)), features], schema=schema)


def read_features(path: Path, origin: dict[str, Any]) -> list[TextFeatures]:
    """Map a file into memory. Raises CorpusError if it is damaged or has another origin."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        metadata = reader.schema.metadata
        found, heads = json.loads(metadata[ORIGIN]), json.loads(metadata[TEXTS])
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise CorpusError(f"{path}: no readable features ({problem}); delete it to have them computed anew") from error
    if differences := list(differing(found, json.loads(json.dumps(origin)))):
        raise CorpusError(
            f"{path}: features of something else: {'; '.join(differences)}; "
            "name another folder with --features, or delete the file"
        )
    return [_text(head, batch) for head, batch in zip(heads, batches, strict=True)]


def differing(found: dict[str, Any], expected: dict[str, Any]) -> Sequence[str]:
    """Return the differences of two JSON objects in words, recursively."""
    said: list[str] = []
    for key in dict.fromkeys([*expected, *found]):
        one, other = found.get(key), expected.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            said += [f"{key}.{line}" for line in differing(one, other)]
        elif one != other:
            said.append(f"{key} is {_short(one)}, expected {_short(other)}")
    return said


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else json.dumps(value)


def _text(head: dict[str, Any], batch: Any) -> TextFeatures:
    column = batch.column(FEATURES)
    bits = from_dlpack(column.flatten()).view(len(column), -1)  # [num_tokens, hidden] uint16
    return TextFeatures(
        head["name"], head["first_row"], from_dlpack(batch.column(TOKEN_IDS)), bits.view(torch.bfloat16)
    )
