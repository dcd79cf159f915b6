"""The contract of rules that say which tokens of a job may come next, and of their state behind its output."""

from __future__ import annotations

from typing import Protocol

import numpy as np

WORD_BITS = 32  # tokens of one word of a mask
CONSTRAINT_REFUSED = "constraint_refused"  # the error code of a job whose rules can't be followed from where it stands


class ConstraintError(ValueError):
    """No mask can be said, or a token is none of those that may come. The message is for the user."""


class Constraint(Protocol):
    """A rule behind some output tokens. Whatever was pushed and popped, it is a function of these tokens alone."""

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next, as `num_mask_words` words of uint32, lowest bit first; None: any may.

        It may have none. Raises ConstraintError where it can't be told.
        """

    def is_free(self, token_ids: list[int]) -> bool:
        """Return whether any token may come here and behind any of these, in any order. False is always safe."""

    def guess(self, token_ids: np.ndarray) -> int:
        """Choose the one to draft of some tokens that may come."""

    def push(self, token_id: int) -> None:
        """Go on behind one more token. Raises ConstraintError for one that the mask does not have."""

    def pop(self, num_tokens: int) -> None:
        """Go back to before the last tokens."""


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask of so many tokens."""
    return -(-vocab_size // WORD_BITS)


def allows(mask: np.ndarray, token_id: int) -> bool:
    """Return whether a mask has a token."""
    return bool(mask[token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & np.uint32(1))


def tokens_of(mask: np.ndarray) -> np.ndarray:
    """The tokens that a mask has, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """The mask that has these tokens alone."""
    mask = np.zeros(num_mask_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
    return mask
