"""The grammars that jobs ask for, over one model's tokens as llguidance knows them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from swiftbatch.jobs.structure import Structure
from swiftbatch.worker.constraints.definitions import StructureError, definition_of, is_lark, named_tokens, reason_of
from swiftbatch.worker.constraints.grammar import Grammar
from swiftbatch.worker.drawing.rules import ConstraintError, allows

CACHED = 256  # grammars


class GrammarTokenizer:
    """A model's tokens as llguidance knows them, and the grammars that were asked for over them."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer`: a fast one of `transformers`. Raises ConstraintError for one that has no bytes to speak of."""
        from llguidance import LLTokenizer

        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self._eos_token_ids:
            raise ConstraintError("the model has no end-of-text token, so no text of a grammar would end")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        try:
            if backend is None:
                raise ValueError("it is none of the tokenizers library")
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(self._eos_token_ids))
        except Exception as error:  # of any kind: the library raises bare ones
            raise ConstraintError(f"the model's tokenizer is not supported: {reason_of(str(error))}") from error
        self._token_lengths = token_lengths(self._tokenizer, vocab_size, self._eos_token_ids)
        self.grammar = functools.lru_cache(CACHED)(self._grammar)

    def _grammar(self, structure: Structure) -> Grammar:
        """Make the grammar of a structure. Raises StructureError with the library's reason."""
        has_lines = is_lark(structure)
        try:
            if has_lines:
                self._refuse_ends(structure.text)
            definition = definition_of(structure)
            return Grammar(self._tokenizer, definition, self._eos_token_ids, self._token_lengths, has_lines)
        except (ConstraintError, ValueError) as error:
            raise StructureError(structure, str(error)) from None

    def _refuse_ends(self, lark: str) -> None:
        """Raise ConstraintError for a grammar that names a token which ends the text, wherever it stands."""
        from llguidance import LLMatcher

        for token in named_tokens(lark):
            alone = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(f'start: {token} "a"'), log_level=0)
            mask = np.frombuffer(alone.compute_bitmask(), dtype=np.uint32)
            if not alone.is_error() and any(allows(mask, token_id) for token_id in self._eos_token_ids):
                raise ConstraintError(f"found {token}, which ends the text; expected none: it ends with the grammar")


def token_lengths(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> np.ndarray:
    """The number of bytes of each token, `[vocab]`; 0 for an end, which comes where nothing else does."""
    sizes = [len(tokenizer.decode_bytes([token_id])) for token_id in range(vocab_size)]
    sizes = [0 if token_id in eos_token_ids else size for token_id, size in enumerate(sizes)]
    return np.array(sizes, dtype=np.int32)
