"""Mistral's `tekken.json` as a model's only tokenizer, read by the optional library mistral-common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.worker.model.digests import TEKKEN_FILE
from swiftbatch.worker.text.chat_template import ChatTemplate, words_of
from swiftbatch.worker.text.token_bytes import DecoderSteps, TokenBytes

BYTES_AS_THEY_ARE = DecoderSteps(lambda name, is_first: name, str.encode, b" ", 0)


class TekkenTokenizer:
    """`tekken.json` with the interface of a `transformers` tokenizer, as far as needed."""

    chat_template = None

    def __init__(self, folder: Path) -> None:
        """Raise ImportError without the library, and its errors for an unreadable file."""
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
        """Return a text's token ids; without special tokens, a control token's name is that token."""
        if not add_special_tokens and text in self._special:
            return [self._special[text]]
        return list(self._tekken.encode(text, bos=add_special_tokens, eos=False))

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        policy = self._ignore if skip_special_tokens else self._keep
        ids = [token_ids] if isinstance(token_ids, int) else list(map(int, token_ids))
        return str(self._tekken.decode(ids, special_token_policy=policy))

    @property
    def num_tokens(self) -> int:
        return int(self._tekken.n_words)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return str(self._tekken.id_to_piece(token_id))

    def get_vocab(self) -> dict[str, int]:
        """Return the control tokens; others have no names."""
        return dict(self._special)

    def is_special(self, token_id: int) -> bool:
        return bool(self._tekken.is_special(token_id))

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; for a control token, return the bytes of its name."""
        return bytes(self._tekken.id_to_byte_piece(token_id, self._keep))


class TekkenBytes(TokenBytes):
    """Bytes of each token, read from the file."""

    def __init__(self, tokenizer: TekkenTokenizer, shown: Collection[str] = ()) -> None:
        """A text shows the control tokens `shown`."""
        dict.__init__(self)
        self._tekken = tokenizer
        self._shown = {token_id for name, token_id in tokenizer.get_vocab().items() if name in shown}

    def is_in_text(self, token_id: int) -> bool:
        is_hidden = self._tekken.is_special(token_id) and token_id not in self._shown
        return token_id < self._tekken.num_tokens and not is_hidden

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        return self._tekken.bytes_of(token_id) if token_id < self._tekken.num_tokens else b""


class TekkenChat(ChatTemplate):
    """Chats as tokens by mistral-common, without a template."""

    def own_tokens(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[int]:
        """Return token ids of messages. Raises ValueError, for the user, if the library refuses them."""
        options = options or TemplateOptions()
        try:
            token_ids = self._tokens(self._texts.as_taken(messages, options), options)
        except Exception as error:  # the library raises many kinds
            raise ValueError(f"messages: mistral-common refuses them: {words_of(error)}") from None
        self._texts.refuse_lost(messages, options, self._tokenizer.decode(token_ids))
        return token_ids

    def render(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """Return the text of messages with the names of control tokens."""
        return str(self._tokenizer.decode(self.own_tokens(messages, options)))

    def _rendered(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        return str(self._tokenizer.decode(self._tokens(messages, options)))

    def _mentions(self, name: str) -> bool:
        return False

    def _tokens(self, messages: Sequence[dict[str, Any]], options: TemplateOptions) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        names = ("role", "content", "tool_calls", "tool_call_id")
        texts = [{name: message[name] for name in names if name in message} for message in messages]
        goes_on, tools = options.continue_final_message, list(options.tools) or None
        request = ChatCompletionRequest.from_openai(texts, tools, continue_final_message=goes_on)
        return list(self._tokenizer.chats.encode_chat_completion(request).tokens)
