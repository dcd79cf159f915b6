"""Keeps texts that spell control tokens apart from the control tokens of chat templates.

A template joins texts and its own control tokens into one text, in which the library finds the tokens by their names.
`split_special_tokens` would split the template's, too. So a break goes into each spelling in front of the template: a
character that no text has. Then the library finds the template's tokens alone, and its normalizer takes the breaks out
of the texts between them. These are split as ordinary texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Normalizer, Replace
from tokenizers.normalizers import Sequence as Normalizers

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.worker.text.chat_template import ALIASES, THOUGHTS

BREAK = "\ufdd0"  # Unicode keeps it for a program's own use
ASSISTANT = {"assistant", *(role for role, other in ALIASES.items() if other == "assistant")}
MARKS = {mark for marks in THOUGHTS for mark in marks}  # templates look for them in answers


class PlainContent:
    """Breaks up the names of control tokens in texts, and encodes texts with breaks."""

    def __init__(self, tokenizer: Any, model: str, is_the_library_s: bool) -> None:
        """Raise ModelError if the tokenizer does not keep such texts apart."""
        if not is_the_library_s:
            raise _refusal(model, "its tokenizer has rules of its own")
        controls = _control_tokens(tokenizer)
        if found := sorted(str(token) for token in controls if token.normalized):
            raise _refusal(model, f"its tokenizer looks for {found[0]} in normalized text")
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        names = {str(token) for token in controls}
        self._names, self._names_in_answers = _Names(names), _Names(names - MARKS)

    def broken(self, text: str) -> str:
        return self._names.broken(text)

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with breaks in all texts, in answers but for the marks of thoughts."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        names = self._names_in_answers if message.role in ASSISTANT else self._names
        fields = dict(message) | {
            name: names.broken(value) if (value := getattr(message, name)) is not None else None
            for name in ("content", "name", "reasoning_content", "tool_call_id")
        }
        if message.parts:
            parts = tuple(map(names.broken, message.parts))
            fields |= {"parts": parts, "content": "\n".join(parts)}
        fields["tool_calls"] = tuple(_call(call, names) for call in message.tool_calls)
        return Message.model_construct(**fields)

    def options(self, options: TemplateOptions | None) -> TemplateOptions | None:
        """Return options with breaks in the texts of tools and variables."""
        if options is None:
            return None
        tools, kwargs = self._names.broken_in(options.tools), self._names.broken_in(options.kwargs)
        return options.model_copy(update={"tools": tuple(tools), "kwargs": kwargs})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._without_breaks.encode(text, add_special_tokens=add_special_tokens).ids)

    @cached_property
    def _without_breaks(self) -> Tokenizer:
        """Return the library's tokenizer, whose normalizer takes breaks out first."""
        tokenizer = Tokenizer.from_str(self._backend.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        normalizers: list[Normalizer] = [Replace(BREAK, "")]
        tokenizer.normalizer = Normalizers(normalizers + ([tokenizer.normalizer] if tokenizer.normalizer else []))
        return tokenizer


class _Names:
    """Names of control tokens."""

    def __init__(self, names: set[str]) -> None:
        self._starts = {name[:end] for name in names for end in range(1, len(name))}
        self._longest = max(map(len, self._starts), default=0)
        longest_first = sorted(names, key=len, reverse=True)
        self._name = re.compile(f"(?=(?:{'|'.join(map(re.escape, longest_first))})).", re.DOTALL) if names else None

    def broken(self, text: str) -> str:
        """Return a text with breaks in the names, and behind a last part that could begin one."""
        if BREAK in text:
            raise ValueError("found the character U+FDD0 in a text, which --plain-content uses; expected no such one")
        if self._name is None:
            return text
        text = self._name.sub(lambda found: found[0] + BREAK, text)
        sizes = range(1, min(self._longest, len(text)) + 1)
        return text + BREAK if any(text[-size:] in self._starts for size in sizes) else text

    def broken_in(self, value: Any) -> Any:
        """Return JSON with breaks in all its texts."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, dict):
            return {self.broken(name): self.broken_in(each) for name, each in value.items()}
        return [self.broken_in(each) for each in value] if isinstance(value, list | tuple) else value


def _call(call: Any, names: _Names) -> Any:
    function = call.function
    arguments = json.dumps(names.broken_in(json.loads(function.arguments)), ensure_ascii=False)
    changed = function.model_copy(update={"name": names.broken(function.name), "arguments": arguments})
    return call.model_copy(update={"function": changed})


def _control_tokens(tokenizer: Any) -> list[Any]:
    """Return the special tokens, and others that the chat template names."""
    templates = tokenizer.chat_template
    source = " ".join(templates.values() if isinstance(templates, dict) else [templates or ""])
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if len(str(token).strip()) > 1]
    return [token for token in tokens if token.special or str(token) in source]


def _refusal(model: str, reason: str) -> ModelError:
    problem = f"--plain-content: {reason}, so names of control tokens cannot stay text"
    return ModelError(f"model {model}: {problem}; leave the option away, and such names out of the texts")
