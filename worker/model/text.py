"""Text to tokens and back, with the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from jobs.chat import Message, TemplateOptions
from jobs.job import Job
from worker.model.chat_template import ChatTemplate, words_of
from worker.model.files import ModelError, ModelFiles, read_config
from worker.model.token_length import max_chars_per_token

GENERIC = "TokenizersBackend"  # the class that reads `tokenizer.json` and adds no rules of its own
PLAIN_KINDS = ("llama", "qwen3")  # whose tokenizers are what `tokenizer.json` says


class TextCodec:
    """A model's tokenizer. Raises ModelError where the model folder has none that loads."""

    def __init__(self, files: ModelFiles) -> None:
        try:
            self._tokenizer = _loader(files).from_pretrained(
                files.path, trust_remote_code=False, local_files_only=True, clean_up_tokenization_spaces=False
            )
        except Exception as error:  # of any kind: the library raises bare ones
            raise ModelError(
                f"model {files.name}: its tokenizer cannot be loaded from {files.path}: {words_of(error)}; "
                "expected files that this version of transformers and tokenizers can read"
            ) from error
        self._max_positions, self._vocab_size = files.max_positions, files.vocab_size
        self._tokenizer.model_max_length = files.max_positions
        self.chat = ChatTemplate(self._tokenizer)

    def encode_job(self, job: Job) -> list[int]:
        """Token ids of a job's prompt, or of its messages through the tokenizer's chat template.

        Raises ValueError as `encode_prompt` and `encode_chat` do.
        """
        if job.messages is not None:
            return self.encode_chat(job.messages, job.template)
        return self.encode_prompt(job.prompt_ids or job.prompt or "")

    def encode_prompt(self, prompt: str | tuple[int, ...]) -> list[int]:
        """Token ids of a prompt; those that it has already stay as they are.

        Raises ValueError, with a reason for the user, where there are no tokens, where the text is so long that it has
        no room in the model, however it is cut into tokens, and where a token is none of the model's.
        """
        if isinstance(prompt, tuple):
            if (most := max(prompt)) >= self._vocab_size:
                raise ValueError(f"prompt: found the token id {most:,}, expected ids below {self._vocab_size:,}")
            return list(prompt)
        self._refuse_far_too_long(prompt)
        return self._checked(self.encode(prompt))

    def encode_chat(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[int]:
        """Token ids of messages. Raises ValueError as `encode_prompt`, and as `ChatTemplate.render`."""
        text = self.chat.render(messages, options)
        self._refuse_far_too_long(text)
        return self._checked(self.encode(text, add_special_tokens=False))  # a template writes its own special tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens that each of some words may come as, as vLLM has them: without a space in front and with one.

        The latter where it changes the first token and not their number. Raises ValueError for a word that has no
        tokens, or one that is none of the model's.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            if not bare or max(bare) >= self._vocab_size:
                raise ValueError(f"field 'bad_words': {word!r} has no tokens of the model's")
            found.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of tokens, without the special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise ValueError("prompt: no tokens come of it; expected at least one")
        if (most := max(token_ids)) >= self._vocab_size:
            raise ValueError(
                f"prompt: token {most:,} ({self._tokenizer.convert_ids_to_tokens(most)!r}) comes of it, and the model "
                f"has {self._vocab_size:,} tokens; its tokenizer is larger than its config.json says (vocab_size)"
            )
        return token_ids

    def _refuse_far_too_long(self, text: str) -> None:
        if len(text) <= self._max_positions or self._max_chars_per_token is None:
            return
        num_tokens = -(-len(text) // self._max_chars_per_token)
        if num_tokens > self._max_positions:
            raise ValueError(
                f"prompt: its {len(text):,} characters are at least {num_tokens:,} tokens, expected at most the "
                f"model's {self._max_positions:,}"
            )

    @cached_property
    def _max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._tokenizer)


def _loader(files: ModelFiles) -> Any:
    """What AutoTokenizer would choose, without AutoTokenizer where that is sure: it costs torch, seconds, 300 MB."""
    config = read_config(files.name, files.path)
    path = files.path / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("model_type") in PLAIN_KINDS and said.get("tokenizer_class") == GENERIC and "auto_map" not in said:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
