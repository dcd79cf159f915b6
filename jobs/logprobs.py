"""Log-probabilities of drawn tokens, and their two forms in OpenAI's output lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import Job
from swiftbatch.jobs.sampling_params import ALONE

NO_TOKEN = -1
UNLIKELY = -9999.0  # stands for -inf, which JSON lacks


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens; an impossible token has -inf. One array is one copy in a step."""

    numbers: NDArray[np.int32]  # [num_tokens, 1 + 2 * num_top]: bits of `logprobs`, then ids and bits of the likeliest

    @classmethod
    def empty(cls, num_tokens: int, num_top: int) -> TokenLogprobs:
        return cls(np.empty((num_tokens, 1 + 2 * num_top), np.int32))

    @classmethod
    def of(
        cls, logprobs: NDArray[np.float32], top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]
    ) -> TokenLogprobs:
        found = cls.empty(*top_ids.shape)
        found.logprobs[:], found.top_ids[:], found.top_logprobs[:] = logprobs, top_ids, top_logprobs
        return found

    @classmethod
    def joined(cls, parts: Iterable[TokenLogprobs], num_top: int) -> TokenLogprobs:
        return cls(np.concatenate([cls.empty(0, num_top).numbers, *(part.numbers for part in parts)]))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_top(self) -> int:
        return int(self.numbers.shape[1] // 2)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Return a view `[num_tokens]`."""
        return self.numbers[:, 0].view(np.float32)

    @property
    def top_ids(self) -> NDArray[np.int32]:
        """Return a view `[num_tokens, num_top]`, likeliest first; NO_TOKEN fills missing places."""
        return self.numbers[:, 1::2]

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """Return a view `[num_tokens, num_top]`."""
        return self.numbers[:, 2::2].view(np.float32)

    def top(self, num_top: int) -> TokenLogprobs:
        return TokenLogprobs(self.numbers[:, : 1 + 2 * num_top])

    def part(self, start: int, end: int) -> TokenLogprobs:
        return TokenLogprobs(self.numbers[start:end])


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens but the first, which follows nothing."""

    token_ids: Sequence[int]  # all of them
    logprobs: TokenLogprobs
    ranks: NDArray[np.int64]  # [num_tokens - 1], 1 for the likeliest


class TokenTexts(Protocol):
    """The tokenizer methods that logprobs need."""

    def token_bytes(self, token_id: int) -> bytes:
        pass

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return the number of characters before each token."""


def shown_logprobs(
    job: Job,
    token_ids: NDArray[np.uint32],
    logprobs: TokenLogprobs,
    tokenizer: TokenTexts,
    prompt: PromptLogprobs | None = None,
    echo: str = "",
) -> dict[str, Any]:
    """Return all log-probabilities in OpenAI's form, after those of a `prompt` whose text is the `echo`.

    Tokens after the end of the text have offsets as if they were shown.
    """
    if len(logprobs) != len(token_ids):
        raise ValueError(f"found {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    if job.messages is not None:
        return _of_chat(token_ids.tolist(), logprobs, tokenizer)
    num_shown = 0 if job.sampling.echo == ALONE else len(token_ids)
    own = completion_logprobs(token_ids[:num_shown].tolist(), logprobs.part(0, num_shown), tokenizer)
    if prompt is None or not job.sampling.echo:
        return own
    return _behind(_of_prompt(prompt, logprobs.num_top, tokenizer), own, len(echo))


def completion_logprobs(token_ids: Sequence[int], logprobs: TokenLogprobs, tokenizer: TokenTexts) -> dict[str, Any]:
    """Return the form for completions: the drawn token comes first, and of two equal texts the first one stays."""
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


def _of_prompt(prompt: PromptLogprobs, num_top: int, tokenizer: TokenTexts) -> dict[str, Any]:
    found = completion_logprobs(prompt.token_ids[1:], prompt.logprobs.top(num_top), tokenizer)
    return {
        "tokens": [_Texts(tokenizer, "bytes:")[prompt.token_ids[0]][0], *found["tokens"]],
        "token_logprobs": [None, *found["token_logprobs"]],
        "top_logprobs": [None, *found["top_logprobs"]],
        "text_offset": tokenizer.text_offsets(prompt.token_ids),
    }


def _behind(prompt: dict[str, Any], own: dict[str, Any], num_characters: int) -> dict[str, Any]:
    """Return the lists of an output behind those of its prompt, whose text has so many characters."""
    own = own | {"text_offset": [num_characters + each for each in own["text_offset"]]}
    return {name: [*values, *own[name]] for name, values in prompt.items()}


def shown_prompt_logprobs(
    prompt: PromptLogprobs, num_top: int, tokenizer: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's form: null, then of each token itself and the likeliest ones, by their ids."""

    def entry(token_id: int, value: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": value, "rank": rank, "decoded_token": text}

    shown: list[dict[str, dict[str, Any]] | None] = [None]
    own, logprobs = _finite(prompt.logprobs.logprobs).tolist(), prompt.logprobs.top(num_top)
    rows = _rows(prompt.token_ids[1:], own, logprobs)
    for (token_id, value, ids, values), rank in zip(rows, prompt.ranks.tolist(), strict=True):
        top = [(each, number) for each, number in zip(ids, values, strict=True) if each != NO_TOKEN]
        others = {str(each): entry(each, number, place) for place, (each, number) in enumerate(top, start=1)}
        shown.append({str(token_id): entry(token_id, value, rank), **others})
    return shown


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
    """Yield token, its log-probability, and ids and log-probabilities of the likeliest."""
    return zip(token_ids, own, logprobs.top_ids.tolist(), _finite(logprobs.top_logprobs).tolist(), strict=True)


class _Texts(dict[int, tuple[str, list[int]]]):
    r"""Text and bytes of each token; bytes that are no UTF-8 become `\xe2\x80`."""

    def __init__(self, tokenizer: TokenTexts, mark: str = "") -> None:
        """Put `mark` before bytes that are no UTF-8."""
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


# Readers of both forms.

Name = tuple[str, tuple[int, ...]]  # text, and bytes in a chat


class ShownToken(NamedTuple):
    """A token of an output with its log-probability, and the likeliest tokens with theirs."""

    name: Name
    logprob: float
    top: list[tuple[Name, float]]

    def with_top(self, num_top: int) -> ShownToken:
        return self._replace(top=self.top[:num_top])


def shown_tokens(job: Job, shown: Mapping[str, Any]) -> list[ShownToken]:
    """Read log-probabilities as `shown_logprobs` writes them.

    Raises KeyError, TypeError, AttributeError or ValueError for anything else.
    """
    if job.messages is not None:
        return [
            ShownToken(*_named(entry), [_named(each) for each in entry["top_logprobs"]]) for entry in shown["content"]
        ]
    rows = zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True)
    return [
        ShownToken(_name(token), _number(value), [(_name(text), _number(each)) for text, each in top.items()])
        for token, value, top in rows
    ]


def shown_prompt_tokens(shown: Sequence[Any]) -> list[ShownToken]:
    """Read a prompt's log-probabilities as `shown_prompt_logprobs` writes them, but those of the first token.

    The tokens are named by their ids. Raises as `shown_tokens` does, and IndexError.
    """
    entries = [[(_name(token), _number(each["logprob"])) for token, each in entry.items()] for entry in shown[1:]]
    return [ShownToken(*entry[0], entry) for entry in entries]


def parts_of_echo(
    shown: Mapping[str, Any], num_tokens: int, num_characters: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the lists of a completion behind a prompt with so many tokens and characters.

    Raises as `shown_tokens` does.
    """
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    prompt, own = {name: shown[name][:num_tokens] for name in names}, {name: shown[name][num_tokens:] for name in names}
    return prompt, own | {"text_offset": [each - num_characters for each in own["text_offset"]]}


def _named(entry: Mapping[str, Any]) -> tuple[Name, float]:
    return _name(entry["token"], entry["bytes"]), _number(entry["logprob"])


def _name(text: Any, its_bytes: Any = ()) -> Name:
    if type(text) is not str or any(type(each) is not int for each in its_bytes):
        raise TypeError(f"found {text!r} with bytes {its_bytes!r}, expected a token")
    return text, (*its_bytes,)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"found {value!r}, expected a log-probability")
    return float(value)
