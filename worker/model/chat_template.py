"""The chat template of a tokenizer: messages to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from swiftbatch.jobs.chat import Message, TemplateOptions
from swiftbatch.worker.model.message_texts import MessageTexts

MAX_WORDS = 500  # characters of another program's error


class ChatTemplate:
    """Makes messages into text, by a model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts = MessageTexts(self._rendered)

    def render(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """The text of messages. Raises ValueError, with a reason for the user, where there is no template, or one that
        refuses them."""
        if self._tokenizer.chat_template is None:
            raise ValueError("messages: this model's tokenizer has no chat template; send a `prompt` instead")
        options = options or TemplateOptions()
        try:
            return self._rendered(self._texts.as_taken(messages, options), options)
        except Exception as error:  # of any kind: the template is a program that came with the model
            raise ValueError(f"messages: the model's chat template refuses them: {words_of(error)}") from None

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
        text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.kwargs,
        )
        return str(text)

    def _mentions(self, name: str) -> bool:
        templates = self._tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)


def words_of(error: Exception) -> str:
    """The words of an error, in one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."
