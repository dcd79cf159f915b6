"""Texts for GRIFFIN's draft model, from books and from the target, with the target's features in Arrow files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.progress import track
from torch.utils.dlpack import from_dlpack

from swiftbatch.worker.drafters.griffin.draft_input import NUM_SINKS, WINDOW, window_start
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.recipes import LEARNED_SAMPLING, OWN_SAMPLING, GriffinRecipe, HeadRecipe
from swiftbatch.worker.training.training_folder import differing
from swiftbatch.worker.training.training_texts import (
    CorpusError,
    Text,
    book_texts,
    held_out_texts,
    hidden_states,
    jumping_positions,
    learned_texts,
    read_books,
)

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


def _text(head: dict[str, Any], batch: Any) -> TextFeatures:
    column = batch.column(FEATURES)
    bits = from_dlpack(column.flatten()).view(len(column), -1)  # [num_tokens, hidden] uint16
    return TextFeatures(
        head["name"], head["first_row"], from_dlpack(batch.column(TOKEN_IDS)), bits.view(torch.bfloat16)
    )


FOLDER = "features"  # default name within the output
TRAIN, TEST = "*train*.jsonl", "*test*.jsonl"
NUM_HELD_OUT_TOKENS = 1024  # most tokens per test book

Texts = dict[str, list[Text]]


@dataclass(frozen=True)
class GriffinFeatures:
    """Texts with features, each at least a window long."""

    books: list[TextFeatures]
    own: list[TextFeatures]  # empty if the recipe uses no own texts
    held_out: list[TextFeatures]  # empty without test books


def griffin_features(
    target: TargetModel, data: Path, folder: Path, recipe: GriffinRecipe, report: Callable[[str], None]
) -> GriffinFeatures:
    """Read the features in `folder`; compute missing ones. Raises CorpusError."""
    texts, length, features = recipe.texts, recipe.window_length, partial(_of_file, target, folder, report)
    origin = {"data": data_digest(data, TRAIN), "num_book_tokens": texts.num_book_tokens, "window_length": length}
    books = features(
        "books", origin, lambda: {"books": book_texts(data, TRAIN, target.files, texts.num_book_tokens, length)}
    )
    own_origin = origin | {"num_own_texts": texts.num_own_texts, **_own_origin(texts, list(LEARNED_SAMPLING))}
    own = features("own", own_origin, lambda: _own(target, books, recipe)) if texts.num_own_texts else []
    if not any(data.rglob(TEST)):
        report(f"{data}: no {TEST}; the accuracy is not measured")
        return GriffinFeatures(books, own, [])
    tested = replace(texts, num_book_tokens=min(texts.num_book_tokens, NUM_HELD_OUT_TOKENS))
    origin = {"data": data_digest(data, TEST), "num_book_tokens": tested.num_book_tokens}
    origin |= _own_origin(texts, list(OWN_SAMPLING.values()))
    held_out = features("held-out", origin, lambda: held_out_texts(target, data, tested, report))
    return GriffinFeatures(books, own, held_out)


def _of_file(
    target: TargetModel,
    folder: Path,
    report: Callable[[str], None],
    name: str,
    origin: dict[str, Any],
    make: Callable[[], Texts],
) -> list[TextFeatures]:
    """Return the texts of a file with their features; it is made if missing."""
    path = folder / f"{name}.arrow"
    origin = {"model": target.files.fingerprint, **origin}
    if not path.is_file():
        write_features(path, target, make(), origin)
    found = read_features(path, origin)
    report(f"{name}: {len(found)} texts, {sum(len(text.token_ids) for text in found):,} tokens")
    return found


def data_digest(data: Path, pattern: str) -> str:
    """Return the SHA-256 of the files that `read_books` reads. Raises CorpusError if there are none."""
    next(read_books(data, pattern), None)
    digest = hashlib.sha256()
    for path in [data] if data.is_file() else sorted(data.rglob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _own(target: TargetModel, books: list[TextFeatures], recipe: GriffinRecipe) -> Texts:
    prompted = [Text(book.token_ids.tolist()) for book in books]
    longest = max(len(book.token_ids) for book in books)
    size = min(recipe.texts.num_prompt_tokens, longest) + recipe.texts.num_own_tokens
    if size < recipe.window_length:
        raise CorpusError(
            f"own texts of {size} tokens, prompt included, are too short; expected {recipe.window_length} or more: "
            "longer books make longer prompts, and with --own-texts 0 there are none"
        )
    return {"own texts": learned_texts(target, prompted, recipe.texts)}


def _own_origin(texts: HeadRecipe, ways: list[Any]) -> dict[str, Any]:
    """Return everything that determines the target's own texts, except model and books."""
    sampling = [texts.own_sampling(way).model_dump(mode="json", exclude_defaults=True) for way in ways]
    return {"num_prompt_tokens": texts.num_prompt_tokens, "sampling": sampling}


@dataclass(frozen=True)
class Windows:
    """Rows in entries 0, 1, ... of windows of equal length."""

    token_ids: torch.Tensor  # [num_windows, length] int64
    inputs: torch.Tensor  # [num_windows, length, hidden]: the feature before each token; zeros for a text's first
    features: torch.Tensor  # [num_windows, length, hidden]: the feature at each token
    num_before: torch.Tensor  # [num_windows, length] int64: number of preceding rows without a gap in the text

    @classmethod
    def gather(cls, picks: list[tuple[TextFeatures, np.ndarray]], device: torch.device) -> Windows:
        """Copy windows from texts, each given by positions `[length]`."""
        windows = [_rows(text, positions) for text, positions in picks]
        return cls(*(torch.stack(tensors).to(device) for tensors in zip(*windows, strict=True)))

    def has_next(self) -> torch.Tensor:
        """Return the rows whose next row has the text's next token, `[num_windows, length] bool`."""
        return self.num_before.roll(-1, dims=1) == self.num_before + 1

    def entries(self) -> torch.Tensor:
        num_windows, length = self.token_ids.shape
        return torch.arange(length, device=self.token_ids.device).expand(num_windows, -1)


def _rows(text: TextFeatures, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
    places = torch.from_numpy(positions)
    inputs = text.features[(places - 1).clamp(min=0)]
    inputs[places == 0] = 0.0
    new = np.flatnonzero(np.diff(positions, prepend=-2) != 1)  # the window lacks the predecessors of these rows
    rows = np.arange(len(positions))
    num_before = rows - new[np.searchsorted(new, rows, side="right") - 1]
    return text.token_ids[places].long(), inputs, text.features[places], torch.from_numpy(num_before)


class FeatureWindowSource:
    """Draws a step's windows from the recipe's seed and the step's number."""

    def __init__(self, books: list[TextFeatures], own: list[TextFeatures], recipe: GriffinRecipe) -> None:
        self._recipe = recipe
        num_own = round(recipe.own_share * recipe.num_step_windows) if own else 0
        self._parts = [(books, recipe.num_step_windows - num_own), (own, num_own)]

    def windows(self, step: int, device: torch.device) -> Windows:
        """Return windows of books and own texts, some of them with a gap, as in long texts."""
        random, length = np.random.default_rng([self._recipe.seed, step]), self._recipe.window_length
        num_sinks = min(NUM_SINKS, length // 2)
        picks = []
        for texts, num_windows in self._parts:
            if num_windows:
                sizes = np.asarray([len(text.token_ids) for text in texts], dtype=np.float64)
                chosen = random.choice(len(texts), size=num_windows, p=sizes / sizes.sum())
                drawn = [(texts[index], len(texts[index].token_ids)) for index in chosen]
                picks += [(text, jumping_positions(random, size, length, num_sinks)) for text, size in drawn]
        return Windows.gather(picks, device)


def windows_in_use(text: TextFeatures, device: torch.device) -> Iterator[tuple[Windows, int]]:
    """Yield windows and their first new row; together, the new rows are all rows of a text."""
    num_tokens = len(text.token_ids)
    ends = [*range(2 * WINDOW - 1, num_tokens, WINDOW), num_tokens]  # the window restarts after these rows
    for first, end in pairwise([0, *ends]):
        start = window_start(first + 1)
        positions = np.concatenate([np.arange(min(NUM_SINKS, end)), np.arange(start, end)])
        yield Windows.gather([(text, positions)], device), len(positions) - (end - first)
