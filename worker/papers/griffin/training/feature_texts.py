"""The texts that GRIFFIN's draft model learns from: books and the target's own, with the target's features along them.

They are computed once and kept in three Arrow files, so that a training that goes on, or another one, finds them: the
own texts take minutes to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftbatch.worker.papers.griffin.training.recipe import GriffinRecipe
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.training.corpus import CorpusError, read_books
from swiftbatch.worker.training.feature_file import TextFeatures, read_features, write_features
from swiftbatch.worker.training.head_recipe import LEARNED_SAMPLING, OWN_SAMPLING, HeadRecipe
from swiftbatch.worker.training.own_texts import Text, book_texts, held_out_texts, learned_texts

FOLDER = "features"  # in the output, where no other one is named
TRAIN, TEST = "*train*.jsonl", "*test*.jsonl"
NUM_HELD_OUT_TOKENS = 1024  # of each test book, at most

Texts = dict[str, list[Text]]


@dataclass(frozen=True)
class GriffinFeatures:
    """Texts with features; a window fits into each of those to learn from."""

    books: list[TextFeatures]
    own: list[TextFeatures]  # none where the recipe wants none
    held_out: list[TextFeatures]  # none where there are no test books


def griffin_features(
    target: TargetModel, data: Path, folder: Path, recipe: GriffinRecipe, report: Callable[[str], None]
) -> GriffinFeatures:
    """Read the features in `folder`; what is not there is computed and written first.

    Raises CorpusError: no books, texts shorter than a window, or a file there that was made from something else.
    """
    texts, length, cache = recipe.texts, recipe.window_length, _Cache(target, folder, report)
    origin = {"data": data_digest(data, TRAIN), "num_book_tokens": texts.num_book_tokens, "window_length": length}
    books = cache.features(
        "books", origin, lambda: {"books": book_texts(data, TRAIN, target.files, texts.num_book_tokens, length)}
    )
    own_origin = origin | {"num_own_texts": texts.num_own_texts, **_own_origin(texts, list(LEARNED_SAMPLING))}
    own = cache.features("own", own_origin, lambda: _own(target, books, recipe)) if texts.num_own_texts else []
    return GriffinFeatures(books, own, _held_out(cache, data, texts))


@dataclass(frozen=True)
class _Cache:
    """Files of features in one folder."""

    target: TargetModel
    folder: Path
    report: Callable[[str], None]

    def features(self, name: str, origin: dict[str, Any], make: Callable[[], Texts]) -> list[TextFeatures]:
        """Return the texts in the file of that name; where there is none, make it."""
        path = self.folder / f"{name}.arrow"
        origin = {"model": self.target.files.fingerprint, **origin}
        if not path.is_file():
            write_features(path, self.target, make(), origin)
        found = read_features(path, origin)
        self.report(f"{name}: {len(found)} texts, {sum(len(text.token_ids) for text in found):,} tokens")
        return found


def _held_out(cache: _Cache, data: Path, texts: HeadRecipe) -> list[TextFeatures]:
    """Test books, and what the target says behind their beginnings."""
    if not any(data.rglob(TEST)):
        cache.report(f"{data}: no {TEST}; the accuracy is not measured")
        return []
    tested = replace(texts, num_book_tokens=min(texts.num_book_tokens, NUM_HELD_OUT_TOKENS))
    origin = {"data": data_digest(data, TEST), "num_book_tokens": tested.num_book_tokens}
    origin |= _own_origin(texts, list(OWN_SAMPLING.values()))
    return cache.features("held-out", origin, lambda: held_out_texts(cache.target, data, tested, cache.report))


def data_digest(data: Path, pattern: str) -> str:
    """SHA-256 over the files that `read_books` reads. Raises CorpusError as it does, where there are none."""
    next(read_books(data, pattern), None)
    digest = hashlib.sha256()
    for path in [data] if data.is_file() else sorted(data.rglob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _own(target: TargetModel, books: list[TextFeatures], recipe: GriffinRecipe) -> Texts:
    """Own texts behind stretches of the books."""
    prompted = [Text(book.token_ids.tolist()) for book in books]
    longest = max(len(book.token_ids) for book in books)
    size = min(recipe.texts.num_prompt_tokens, longest) + recipe.texts.num_own_tokens
    if size < recipe.window_length:
        raise CorpusError(
            f"own texts of {size} tokens, prompt included, are too short; expected {recipe.window_length} or more: "
            "longer books make longer prompts"
        )
    return {"own texts": learned_texts(target, prompted, recipe.texts)}


def _own_origin(texts: HeadRecipe, ways: list[Any]) -> dict[str, Any]:
    """Describe all that decides own texts, beside the model and the books."""
    sampling = [texts.own_sampling(way).model_dump(mode="json", exclude_defaults=True) for way in ways]
    return {"num_prompt_tokens": texts.num_prompt_tokens, "sampling": sampling}
