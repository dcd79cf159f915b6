"""Contract of rules that restrict the next tokens, and of their state, without torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

WORD_BITS = 32
CONSTRAINT_REFUSED = "constraint_refused"  # error code if rules cannot be followed


class ConstraintError(ValueError):
    """The allowed tokens cannot be determined, or a token is not allowed. The message is for the user."""


class Constraint(Protocol):
    """State of a rule after some output tokens. It depends only on these tokens."""

    def mask(self) -> np.ndarray | None:
        """Return the allowed tokens as `num_mask_words` uint32 words, lowest bit first, or None if all are allowed.

        Raises ConstraintError if the allowed tokens cannot be determined.
        """

    def is_free(self, token_ids: list[int]) -> bool:
        """Return whether any of these tokens may come here, in any order; False is always safe."""

    def push(self, token_id: int) -> None:
        """Append a token. Raises ConstraintError if it is not allowed."""

    def pop(self, num_tokens: int) -> None:
        """Remove the last tokens."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def allows(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & np.uint32(1))


def tokens_of(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    mask = np.zeros(num_mask_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
    return mask
