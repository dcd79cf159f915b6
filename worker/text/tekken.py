"""Mistral's `tekken.json` where a model has no other tokenizer: texts and chats through the library mistral-common.

The library is optional. It keeps control tokens out of texts, so a chat becomes tokens without a text between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swiftbatch.jobs.chat import Message, TemplateOptions
from swiftbatch.worker.model.digests import TEKKEN_FILE
from swiftbatch.worker.text.chat_template import MessageTexts, words_of
from swiftbatch.worker.text.token_bytes import DecoderSteps, TokenBytes

BYTES_AS_THEY_ARE = DecoderSteps(lambda name, is_first: name, str.encode, b" ", 0)


class TekkenTokenizer:
    """A `tekken.json`, with the words that a tokenizer of `transformers` has for what is asked of it here."""

    chat_template = None
    model_max_length = 0

    def __init__(self, folder: Path) -> None:
        """Raises ImportError without the library, and its errors for a file that it does not read."""
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
            from mistral_common.tokens.tokenizers.tekken import SpecialTokenPolicy
        except ModuleNotFoundError as error:
            absent = str(error.name).partition(".")[0]
            raise ImportError(
                f"its only tokenizer is {TEKKEN_FILE}, which the library mistral-common reads, and {absent} is not "
                "installed here; install swiftbatch with its extra `mistral`"
            ) from None
        self.chats = MistralTokenizer.from_file(folder / TEKKEN_FILE, mode=ValidationMode.test)
        self._tekken = self.chats.instruct_tokenizer.tokenizer
        self._keep, self._ignore = SpecialTokenPolicy.KEEP, SpecialTokenPolicy.IGNORE
        self._special = {self._tekken.id_to_piece(each): each for each in sorted(self._tekken.special_ids)}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> list[int]:
        """Token ids of a text; one that is a control token's name is that token, where no special ones are added."""
        if not add_special_tokens and text in self._special:
            return [self._special[text]]
        return list(self._tekken.encode(text, bos=add_special_tokens, eos=False))

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of tokens."""
        policy = self._ignore if skip_special_tokens else self._keep
        ids = [token_ids] if isinstance(token_ids, int) else list(map(int, token_ids))
        return str(self._tekken.decode(ids, special_token_policy=policy))

    @property
    def num_tokens(self) -> int:
        """Tokens of the file, control tokens among them."""
        return int(self._tekken.n_words)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        """A token's name."""
        return str(self._tekken.id_to_piece(token_id))

    def get_vocab(self) -> dict[str, int]:
        """The control tokens: a text's own have no names."""
        return dict(self._special)

    def is_special(self, token_id: int) -> bool:
        """Tell a control token, which texts do not show."""
        return bool(self._tekken.is_special(token_id))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a control token its name."""
        return bytes(self._tekken.id_to_byte_piece(token_id, self._keep))


class TekkenBytes(TokenBytes):
    """The bytes of each token, which the file itself says."""

    def __init__(self, tokenizer: TekkenTokenizer) -> None:
        dict.__init__(self)
        self._tekken = tokenizer

    def is_in_text(self, token_id: int) -> bool:
        return token_id < self._tekken.num_tokens and not self._tekken.is_special(token_id)

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        return self._tekken.bytes_of(token_id) if token_id < self._tekken.num_tokens else b""


class TekkenChat:
    """Makes messages into tokens as mistral-common does; there is no template, so no variables of one."""

    reads_clock = False

    def __init__(self, tokenizer: TekkenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = MessageTexts(lambda given, options: tokenizer.decode(self._tokens(given, options)))

    def own_tokens(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[int]:
        """Token ids of messages. Raises ValueError, with a reason for the user, where the library refuses them."""
        options = options or TemplateOptions()
        try:
            token_ids = self._tokens(self._texts.as_taken(messages, options), options)
        except Exception as error:  # of any kind: the library has many, beside pydantic's
            raise ValueError(f"messages: mistral-common refuses them: {words_of(error)}") from None
        self._texts.refuse_lost(messages, options, self._tokenizer.decode(token_ids))
        return token_ids

    def refuse_lost(self, messages: Sequence[Message], options: TemplateOptions | None, prompt: str) -> None:
        """Do nothing: `own_tokens` has refused them."""

    def render(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """The text of messages, with the names of control tokens in it."""
        return self._tokenizer.decode(self.own_tokens(messages, options))

    def without_answer(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """The same: no chat of Mistral's begins an answer."""
        return self.render(messages, options)

    def prepare(self, chats: Iterable[tuple[Sequence[Message], TemplateOptions | None]]) -> None:
        """There is nothing to prepare."""

    def unread(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[str]:
        """Name what has no effect of the messages and options."""
        options = options or TemplateOptions()
        return [*options.kwargs, *self._texts.unread(messages, options)]

    def _tokens(self, messages: Sequence[dict[str, Any]], options: TemplateOptions) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        texts = [{name: message[name] for name in ("role", "content")} for message in messages]
        goes_on = options.continue_final_message
        request = ChatCompletionRequest.from_openai(texts, continue_final_message=goes_on)
        return list(self._tokenizer.chats.encode_chat_completion(request).tokens)
