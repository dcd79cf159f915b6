"""The chat template of a tokenizer: messages to text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from swiftbatch.jobs.chat import Message, TemplateOptions
from swiftbatch.jobs.errors import UserError
from swiftbatch.worker.model.message_texts import MessageTexts
from swiftbatch.worker.model.template_renderer import TemplateLimitError, TemplateRenderer

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_WORDS = 500  # characters of another program's error


class ChatTemplate:
    """Makes messages into text, by a model's tokenizer."""

    def __init__(self, tokenizer: Any, clock: str | None = None) -> None:
        """`clock` is the ISO time that templates hear, None for now."""
        self._tokenizer = tokenizer
        self._clock = clock or datetime.now().astimezone().isoformat(timespec="seconds")
        self._texts = MessageTexts(self._rendered)

    def render(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """The text of messages. Raises ValueError, with a reason for the user, where there is no template, or one that
        refuses them."""
        if self._tokenizer.chat_template is None:
            raise ValueError("messages: this model's tokenizer has no chat template; send a `prompt` instead")
        options = options or TemplateOptions()
        try:
            return self._rendered(self._texts.as_taken(messages, options), options)
        except TemplateLimitError as error:
            raise ValueError(f"messages: the model's chat template {error}") from None
        except UserError:  # it is not the template's
            raise
        except Exception as error:  # of any kind: the template is a program that came with the model
            raise ValueError(f"messages: the model's chat template refuses them: {words_of(error)}") from None

    @property
    def reads_clock(self) -> bool:
        """True if the template may print the time."""
        return self._tokenizer.chat_template is not None and self._mentions("strftime_now")

    def refuse_lost(self, messages: Sequence[Message], options: TemplateOptions | None, prompt: str) -> None:
        """Raise ValueError, with a reason for the user, where the prompt of `render` lacks a text of messages."""
        self._texts.refuse_lost(messages, options or TemplateOptions(), prompt)

    def own_tokens(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[int] | None:
        """None: the tokens of messages are those of their text."""
        return None

    def without_answer(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """The text of messages without the answer that `render` lets it begin. To be asked where that took them."""
        options = options or TemplateOptions()
        return self.render(messages, options.model_copy(update={"add_generation_prompt": False}))

    def unread(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[str]:
        """Name what the template does not read of the messages and options. To be asked where `render` took them."""
        options = options or TemplateOptions()
        names = [name for name in options.kwargs if not self._mentions(name)]
        return [*names, *self._texts.unread(messages, options)]

    def _rendered(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """The text of messages, as transformers' `apply_chat_template` has it."""
        text = self._renderer.render(self._variables(messages, options))
        return _untagged(text) if options.continue_final_message else text

    def _variables(self, messages: list[dict[str, Any]], options: TemplateOptions) -> dict[str, Any]:
        shown = _tagged(messages) if options.continue_final_message else messages
        fixed = {"messages": shown, "tools": None, "documents": None}
        own = {**self._tokenizer.special_tokens_map, **options.kwargs}
        return fixed | {"add_generation_prompt": options.add_generation_prompt} | own

    def prepare(self, chats: Iterable[tuple[Sequence[Message], TemplateOptions | None]]) -> None:
        """Tell which chats `render` is about to be asked for: many at once cost less than each alone."""
        if self._tokenizer.chat_template is not None:
            asked = ((said, options or TemplateOptions()) for said, options in chats)
            with contextlib.suppress(ValueError):  # `render` says what is wrong
                self._renderer.prepare(self._variables(self._texts.as_taken(*each), each[1]) for each in asked)

    @cached_property
    def _renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self._tokenizer.get_chat_template(), self._clock)

    def _mentions(self, name: str) -> bool:
        templates = self._tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)


def _tagged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a tag at the end of the last one's text, up to which a text is to be continued."""
    *others, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*others, last | {"content": content + CONTINUED}]
    *parts, part = content
    return [*others, last | {"content": [*parts, part | {"text": part["text"] + CONTINUED}]}]


def _untagged(text: str) -> str:
    """The text up to the tag. A template that trims messages has taken their last spaces, also those in front of it."""
    before, tag, behind = text.rpartition(CONTINUED.strip())
    if not tag:
        raise ValueError("it does not show the final message, which is to be continued")
    return before if behind.startswith(" ") else before.rstrip()


def words_of(error: Exception) -> str:
    """The words of an error, in one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."
