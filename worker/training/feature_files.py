"""Files of texts, of books and of the target's own, with the target's features; trainings map them into memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.corpus import TEST, TRAIN, CorpusError, read_records
from swiftbatch.worker.training.data_parallel import Report, is_first, meet
from swiftbatch.worker.training.recipes import LEARNED_SAMPLING, OWN_SAMPLING, TextRecipe
from swiftbatch.worker.training.training_folder import differing
from swiftbatch.worker.training.training_texts import (
    NamedText,
    book_texts,
    held_out_texts,
    hidden_states,
    learned_texts,
)

ORIGIN = b"origin"  # key of JSON in the schema's metadata
TOKEN_IDS, FEATURES = "token_ids", "features"
NAME, FIRST_ROW = b"name", b"first_row"  # keys in a batch's metadata
FOLDER = "features"  # default name within the output
FEWEST_TOKENS = 5  # of a test book


@dataclass(frozen=True)
class TextFeatures:
    """One text with the target's features, as views of the file."""

    name: str  # name of a group of texts
    first_row: int  # rows before this one are a prompt
    token_ids: torch.Tensor  # [num_tokens] uint32
    features: torch.Tensor  # [num_tokens, hidden] bfloat16: the target's final hidden states; or [num_tokens, 0]


def write_texts(
    path: Path, texts: Iterable[NamedText], origin: dict[str, Any], target: TargetModel | None = None
) -> None:
    """Write texts as they come, one record batch per text, with the features of a target.

    It holds one text at a time, and writes the file atomically.
    """
    coming = iter(texts)
    first = next(coming)  # before a folder is made, because the data may be bad
    fields = [(TOKEN_IDS, pa.uint32())]
    if target is not None:  # Arrow has no bfloat16
        fields.append((FEATURES, pa.list_(pa.uint16(), target.model.config.hidden_size)))
    schema = pa.schema(fields, metadata={ORIGIN: json.dumps(origin)})
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    try:
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for name, text in itertools.chain([first], coming):
                columns = [pa.array(np.asarray(text.token_ids, dtype=np.uint32))]
                if target is not None:
                    columns.append(_column(hidden_states(target, text.token_ids)))
                batch = pa.record_batch(columns, schema=schema)
                writer.write_batch(batch, custom_metadata={NAME: name, FIRST_ROW: str(text.first_row)})
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _column(hidden: torch.Tensor) -> Any:
    bits = hidden.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).flatten().numpy()
    return pa.FixedSizeListArray.from_arrays(pa.array(bits), hidden.shape[1])


def read_texts(path: Path, origin: dict[str, Any]) -> list[TextFeatures]:
    """Map a file into memory. Raises CorpusError if it is damaged or has another origin."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        found = json.loads(reader.schema.metadata[ORIGIN])
        texts = [_text(reader, number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise CorpusError(f"{path}: no readable features ({problem}); delete it to have them computed anew") from error
    if differences := list(differing(found, json.loads(json.dumps(origin)))):
        raise CorpusError(
            f"{path}: features of something else: {'; '.join(differences)}; "
            "name another folder with --features, or delete the file"
        )
    return texts


def _text(reader: Any, number: int) -> TextFeatures:
    batch, metadata = reader.get_batch_with_custom_metadata(number)
    token_ids = from_dlpack(batch.column(TOKEN_IDS))
    features = torch.empty(len(token_ids), 0, dtype=torch.bfloat16)
    if FEATURES in batch.schema.names:
        bits = from_dlpack(batch.column(FEATURES).flatten()).view(len(token_ids), -1)  # [num_tokens, hidden] uint16
        features = bits.view(torch.bfloat16)
    return TextFeatures(metadata[NAME].decode(), int(metadata[FIRST_ROW]), token_ids, features)


@dataclass(frozen=True)
class TextSource:
    """Texts of a training, each file of which is made once and read again after a kill."""

    target: TargetModel
    data: Path
    folder: Path
    recipe: TextRecipe
    num_needed: int  # least tokens of a text
    report: Report

    def books(self, has_features: bool = True) -> list[TextFeatures]:
        """Return the starts of the training books. Raises CorpusError, as all methods do."""
        size = self.recipe.num_book_tokens
        texts = book_texts(self.data, TRAIN, self.target.files, size, self.num_needed, self.report)
        return self._of_file("books", self._book_origin(), (("books", text) for text in texts), has_features)

    def own(self, books: Sequence[TextFeatures], has_features: bool = True) -> list[TextFeatures]:
        """Return the target's texts after stretches of the books; none if the recipe has none."""
        if not self.recipe.num_own_texts:
            return []
        self._check_own(books)
        prompted = [book.token_ids.numpy() for book in books]
        origin = self._book_origin() | {"num_own_texts": self.recipe.num_own_texts}
        origin |= _own_origin(self.recipe, LEARNED_SAMPLING)
        texts = (("own texts", text) for text in learned_texts(self.target, prompted, self.recipe))
        return self._of_file("own", origin, texts, has_features)

    def held_out(self, num_needed: int, most_tokens: int | None = None) -> list[TextFeatures]:
        """Return test books of `num_needed` to `most_tokens` tokens, and own texts after their starts.

        There are none without test books.
        """
        if not any(self.data.rglob(TEST)):
            self.report(f"{self.data}: no {TEST}; the accuracy is not measured")
            return []
        size = min(self.recipe.num_book_tokens, most_tokens or self.recipe.num_book_tokens)
        origin = {"data": data_digest(self.data, TEST), "num_book_tokens": size, "num_needed": num_needed}
        origin |= _own_origin(self.recipe, OWN_SAMPLING.values())
        texts = held_out_texts(
            self.target, self.data, replace(self.recipe, num_book_tokens=size), num_needed, self.report
        )
        return self._of_file("held-out", origin, texts)

    def _book_origin(self) -> dict[str, Any]:
        digest = data_digest(self.data, TRAIN)
        return {"data": digest, "num_book_tokens": self.recipe.num_book_tokens, "num_needed": self.num_needed}

    def _check_own(self, books: Sequence[TextFeatures]) -> None:
        longest = max(len(book.token_ids) for book in books)
        size = min(self.recipe.num_prompt_tokens, longest) + self.recipe.num_own_tokens
        if size < self.num_needed:
            raise CorpusError(
                f"own texts of {size} tokens, prompt included, are too short; expected {self.num_needed} or more: "
                "longer books make longer prompts, and with --own-texts 0 there are none"
            )

    def _of_file(
        self, name: str, origin: dict[str, Any], texts: Iterable[NamedText], has_features: bool = True
    ) -> list[TextFeatures]:
        """Return the texts of a file, which the first process makes if it is missing."""
        path = self.folder / f"{name if has_features else f'{name}-tokens'}.arrow"
        origin = {"model": self.target.files.fingerprint, **origin}
        if is_first() and not path.is_file():
            write_texts(path, texts, origin, self.target if has_features else None)
        meet()
        found = read_texts(path, origin)
        self.report(f"{name}: {len(found)} texts, {sum(len(text.token_ids) for text in found):,} tokens")
        return found


def data_digest(data: Path, pattern: str) -> str:
    """Return the SHA-256 of the files that `read_records` reads. Raises CorpusError if there are none."""
    next(read_records(data, pattern), None)
    digest = hashlib.sha256()
    for path in [data] if data.is_file() else sorted(data.rglob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _own_origin(texts: TextRecipe, ways: Iterable[Any]) -> dict[str, Any]:
    """Return everything that determines the target's own texts, except model and books."""
    sampling = [texts.own_sampling(way).model_dump(mode="json", exclude_defaults=True) for way in ways]
    return {"num_prompt_tokens": texts.num_prompt_tokens, "sampling": sampling}
