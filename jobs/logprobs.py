"""Log-probabilities of drawn tokens, as a job has them, and in the two forms of OpenAI's that output lines show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import Job

NO_TOKEN = -1
UNLIKELY = -9999.0  # in place of -inf, which JSON does not have


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of consecutive tokens. A token that can't come has -inf."""

    logprobs: NDArray[np.float32]  # [num_tokens], of the drawn tokens
    top_ids: NDArray[np.int32]  # [num_tokens, num_top], the likeliest first; NO_TOKEN where no more could come
    top_logprobs: NDArray[np.float32]  # [num_tokens, num_top]

    @classmethod
    def empty(cls, num_tokens: int, num_top: int) -> TokenLogprobs:
        """Make room for the log-probabilities of `num_tokens` tokens, without values yet."""
        ids, values = np.empty((num_tokens, num_top), np.int32), np.empty((num_tokens, num_top), np.float32)
        return cls(np.empty(num_tokens, np.float32), ids, values)

    @classmethod
    def joined(cls, parts: Iterable[TokenLogprobs], num_top: int) -> TokenLogprobs:
        """Parts that follow each other, as one."""
        all_parts = [cls.empty(0, num_top), *parts]
        return cls(
            np.concatenate([part.logprobs for part in all_parts]),
            np.concatenate([part.top_ids for part in all_parts]),
            np.concatenate([part.top_logprobs for part in all_parts]),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    def part(self, start: int, end: int) -> TokenLogprobs:
        """A view of the log-probabilities of the tokens from `start` up to `end`."""
        return TokenLogprobs(self.logprobs[start:end], self.top_ids[start:end], self.top_logprobs[start:end])


class TokenTexts(Protocol):
    """A tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also for special tokens."""

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Count the characters of the text in front of each of these tokens."""


def shown_logprobs(
    job: Job, token_ids: NDArray[np.uint32], logprobs: TokenLogprobs, tokenizer: TokenTexts
) -> dict[str, Any]:
    """Show the log-probabilities of all generated tokens.

    Tokens behind the end of the text, as those of a stop text, have the places that they would have had.
    """
    if len(logprobs) != len(token_ids):
        raise ValueError(f"found {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    if job.messages is None:
        return _of_completion(token_ids.tolist(), logprobs, tokenizer)
    return _of_chat(token_ids.tolist(), logprobs, tokenizer)


def _of_completion(token_ids: Sequence[int], logprobs: TokenLogprobs, tokenizer: TokenTexts) -> dict[str, Any]:
    """The drawn token stands in front of the likeliest, if it is none of them. Of two with one text the first stays."""
    texts = _Texts(tokenizer, "bytes:")
    own = _finite(logprobs.logprobs).tolist()
    tops = []
    for token_id, value, ids, values in _rows(token_ids, own, logprobs):
        top = {texts[token_id][0]: value}
        for each, number in zip(ids, values, strict=True):
            if each != NO_TOKEN:
                top.setdefault(texts[each][0], number)
        tops.append(top)
    return {
        "tokens": [texts[token_id][0] for token_id in token_ids],
        "token_logprobs": own,
        "top_logprobs": tops,
        "text_offset": tokenizer.text_offsets(token_ids),
    }


def _of_chat(token_ids: Sequence[int], logprobs: TokenLogprobs, tokenizer: TokenTexts) -> dict[str, Any]:
    texts = _Texts(tokenizer)

    def entry(token_id: int, value: float) -> dict[str, Any]:
        token, its_bytes = texts[token_id]
        return {"token": token, "logprob": value, "bytes": its_bytes}

    rows = _rows(token_ids, _finite(logprobs.logprobs).tolist(), logprobs)
    content = [
        entry(token_id, value)
        | {"top_logprobs": [entry(*each) for each in zip(ids, values, strict=True) if each[0] != NO_TOKEN]}
        for token_id, value, ids, values in rows
    ]
    return {"content": content, "refusal": None}


def _rows(token_ids: Sequence[int], own: list[float], logprobs: TokenLogprobs) -> Any:
    """Token, its log-probability, ids and log-probabilities of the likeliest, of each place."""
    return zip(token_ids, own, logprobs.top_ids.tolist(), _finite(logprobs.top_logprobs).tolist(), strict=True)


class _Texts(dict[int, tuple[str, list[int]]]):
    """The text and the bytes of tokens, each made once. Bytes that are no text are written as `\\xe2\\x80`."""

    def __init__(self, tokenizer: TokenTexts, mark: str = "") -> None:
        """`mark` comes in front of bytes that are no text."""
        super().__init__()
        self._tokenizer, self._mark = tokenizer, mark

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        found = self._tokenizer.token_bytes(token_id)
        try:
            text = found.decode()
        except UnicodeDecodeError:
            text = self._mark + "".join(f"\\x{byte:02x}" for byte in found)
        self[token_id] = (text, list(found))
        return self[token_id]


def _finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.maximum(values, np.float32(UNLIKELY))
