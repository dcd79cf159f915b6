"""Structured output: the tokens with which a text can still become one of a grammar's, as llguidance tells them.

A model's tokenizer makes the grammars that jobs ask for, each once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftbatch.jobs.structured_output import Structure
from swiftbatch.worker.constraints.grammar_definitions import (
    StructureError,
    definition_of,
    is_lark,
    named_tokens,
    reason_of,
    unforced,
)
from swiftbatch.worker.drawing.token_rules import ConstraintError, allows, num_mask_words, tokens_of

if TYPE_CHECKING:
    from swiftbatch.worker.drawing.sequence import Sequence

CACHED = 256  # grammars

# beyond the library's own: a choice among thousands is one row of items, and time is bounded by fuel all the same
MAX_ROW_ITEMS, MAX_STEP_ITEMS, STEP_FUEL = 20_000, 500_000, 2_000_000
TRIED_FUEL, NUM_TRIED = 100_000, 16  # fuel for a token when a grammar is taken in, and the tokens to try it on


class Grammar:
    """A structure that was understood, over one model's tokens. As a `Rule`: the output is a text of the grammar."""

    def __init__(
        self,
        tokenizer: Any,
        definition: str,
        eos_token_ids: frozenset[int],
        token_lengths: np.ndarray,
        has_lines: bool = False,
    ) -> None:
        """`tokenizer`: llguidance's; `token_lengths [vocab]` in bytes, 0 for an end; `has_lines`: see `reason_of`.

        Raises ConstraintError, with its reason, for a grammar that can't be.
        """
        self.eos_token_ids, self.token_lengths = eos_token_ids, token_lengths
        self.num_words = num_mask_words(len(token_lengths))
        self._tokenizer, self._definition = tokenizer, definition
        self._first = self._built(definition)
        mask = self._first.compute_bitmask()
        if self._first.is_error():
            raise ConstraintError(reason_of(self._first.get_error(), has_lines))
        if not any(mask):
            raise ConstraintError("it allows no text")
        self._check_ahead()

    def matcher(self) -> Any:
        """An `LLMatcher` in front of the first token."""
        return self._first.deep_copy()

    def rebuilt(self, token_ids: list[int]) -> Any:
        """An `LLMatcher` behind some tokens that shares nothing with others. It may be in an error."""
        matcher = self._built(self._definition)
        matcher.consume_tokens(token_ids)
        return matcher

    def mask(self, matcher: Any, token_ids: list[int]) -> np.ndarray:
        """The tokens that may come behind some others, where a matcher stands. The matcher may be in an error then.

        The tokenizer cuts what has to come into tokens. It takes the name of a special token for that token, though it
        stands for no text: there, and there alone, any tokens may come that spell the name.
        """
        mask = self._words(matcher)
        if np.count_nonzero(mask) != 1 or matcher.is_error() or matcher.is_accepting() or matcher.is_stopped():
            return mask
        only = tokens_of(mask).tolist()
        if len(only) > 1 or matcher.validate_tokens(only) == 1:
            return mask
        spelling = self._built(unforced(self._definition))
        spelling.consume_tokens(token_ids)
        mask = self._words(spelling)
        if spelling.is_error():
            raise ConstraintError(f"the grammar's state can't be told: {reason_of(spelling.get_error())}")
        return mask

    def start(self, sequence: Sequence) -> GrammarConstraint:
        return GrammarConstraint(self)

    def _check_ahead(self) -> None:
        """Raise ConstraintError for a grammar that takes longer to follow than a model to run: tried on long tokens.

        What counts is the library's fuel, which is the same on all machines, and not the time.
        """
        ahead, token_ids = self._built(self._definition, TRIED_FUEL), list[int]()
        for _ in range(NUM_TRIED):
            mask = self.mask(ahead, token_ids)
            if ahead.is_error():
                raise ConstraintError(f"it is too large to follow: {reason_of(ahead.get_error())}")
            allowed = tokens_of(mask)
            longest = int(allowed[np.argmax(self.token_lengths[allowed])])
            if longest in self.eos_token_ids:
                return
            ahead.consume_token(longest)
            token_ids.append(longest)

    def _words(self, matcher: Any) -> np.ndarray:
        """A matcher's mask, `[num_words]`; the library's are rounded up."""
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: self.num_words]

    def _built(self, definition: str, fuel: int = STEP_FUEL) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=fuel,
            verbose_errors=False,
        )
        return LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)


class GrammarConstraint:
    """A grammar behind some tokens. What follows an end-of-text token matters to nobody, and is not restricted."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._token_ids: list[int] = []
        self._num_past_end = 0

    def mask(self) -> np.ndarray | None:
        if self._num_past_end:
            return None
        mask = self._grammar.mask(self._matcher, self._token_ids)
        if self._matcher.is_error():
            self._rebuild()
            mask = self._grammar.mask(self._matcher, self._token_ids)
            self._check()
        return mask

    def is_free(self, token_ids: list[int]) -> bool:
        return self._num_past_end > 0

    def guess(self, token_ids: np.ndarray) -> int:
        """The longest: what has to come is mostly written with as few tokens as can be."""
        return int(token_ids[np.argmax(self._grammar.token_lengths[token_ids])])

    def push(self, token_id: int) -> None:
        if self._num_past_end or token_id in self._grammar.eos_token_ids:
            self._num_past_end += 1
            return
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            try:
                self._rebuild()
            except ConstraintError:
                self._token_ids.pop()
                self._matcher = self._grammar.rebuilt(self._token_ids)
                raise

    def pop(self, num_tokens: int) -> None:
        num_past_end = min(num_tokens, self._num_past_end)
        self._num_past_end -= num_past_end
        if num_left := num_tokens - num_past_end:
            del self._token_ids[-num_left:]
            if not self._matcher.rollback(num_left):
                self._rebuild()

    def _rebuild(self) -> None:
        """Forget what the library has kept of all it looked at, which counts towards its limits."""
        self._matcher = self._grammar.rebuilt(self._token_ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar's state can't be told: {reason_of(self._matcher.get_error())}")


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
