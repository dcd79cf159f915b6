"""The bytes that single tokens stand for: a character may be parts of several tokens, so their texts do not do."""

from __future__ import annotations

from typing import Any

from swiftbatch.worker.texts.decoder_steps import DecoderSteps


class TokenBytes(dict[int, bytes]):
    """The bytes of each token in the middle of a text, found once; special and unknown tokens have none."""

    def __init__(self, tokenizer: Any, steps: DecoderSteps | None) -> None:
        """`steps`: None where the tokenizer's decoder can't be said of single tokens; each is then decoded alone."""
        super().__init__()
        self._tokenizer, self._steps = tokenizer, steps
        self._special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = self.of(token_id) if self.is_in_text(token_id) else b""
        return self[token_id]

    def is_in_text(self, token_id: int) -> bool:
        """Tell if the tokenizer has this token and decoded texts show it."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return name is not None and name not in self._special

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        """A token's bytes, special ones too; none where the tokenizer has no such token."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if name in self._special:
            return str(name).encode()
        if self._steps is None:
            return str(self._tokenizer.decode([token_id])).encode()
        return self._steps.bytes_of(name, is_first)
