"""Text to tokens and back with the model's own tokenizer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any

from tokenizers.pre_tokenizers import ByteLevel

from swiftbatch.jobs.errors import LineError, ModelError
from swiftbatch.jobs.job import Job, LastMarker, Message, TemplateOptions
from swiftbatch.jobs.run.run_records import ThinkingMarkers
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.grammar import GrammarTokenizer
from swiftbatch.worker.constraints.thinking import Markers, Opening, Thinking, ThinkingRule, markers_of
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of
from swiftbatch.worker.sampling.token_masks import ConstraintError
from swiftbatch.worker.text.call_grammars import rule_of_calls
from swiftbatch.worker.text.chat_template import ChatTemplate, words_of
from swiftbatch.worker.text.output_text import BROKEN_CHARACTER, ByteText, LibraryText, OutputText
from swiftbatch.worker.text.plain_content import BREAK, PlainContent
from swiftbatch.worker.text.tekken import BYTES_AS_THEY_ARE, TekkenBytes, TekkenChat, TekkenTokenizer
from swiftbatch.worker.text.token_bytes import DecoderSteps, TokenBytes, steps_of
from swiftbatch.worker.text.tokenizer_cache import WordTokens, cuts_at_spaces
from swiftbatch.worker.text.tokenizer_loading import loaded_tokenizer
from swiftbatch.worker.text.tool_calls import UNKNOWN_FORM, CallForm, form_of

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Rule

COMPOSED = 4  # no character decomposes canonically into more characters; Unicode guarantees this
FACTORS = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1}
KEEPING = {"ByteLevel", "Metaspace", "Digits"}


def max_chars_per_token(tokenizer: Any) -> int | None:
    """Return the most characters per token, or None if no bound is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    factor = _factor(parts["normalizer"])
    added = parts["added_tokens"]
    takes_more = any(token["lstrip"] or token["rstrip"] for token in added)  # surrounding white space of any length
    if factor is None or takes_more or not _keeps_all(parts["pre_tokenizer"]) or not _knows_all(parts):
        return None
    names = [*parts["model"]["vocab"], *(unicodedata.normalize("NFKD", token["content"]) for token in added)]
    return max(map(len, names)) * factor


def _factor(normalizer: Any) -> int | None:
    """Return the most characters that become one, or None if some characters may be dropped."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        factor: int | None = 1
        for part in normalizer["normalizers"]:
            one = _factor(part)
            factor = None if factor is None or one is None else factor * one
        return factor
    if normalizer["type"] == "Replace":
        found = normalizer["pattern"].get("String")
        return 1 if found is not None and len(found) <= len(normalizer["content"]) else None
    return FACTORS.get(normalizer["type"])


def _keeps_all(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer["pretokenizers"])
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return str(pre_tokenizer["type"]) in KEEPING


def _knows_all(parts: dict[str, Any]) -> bool:
    """Return whether each byte has a token; others would be dropped or merged with their neighbours."""
    model = parts["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if '"ByteLevel"' in json.dumps([parts["normalizer"], parts["pre_tokenizer"]]):
        return set(ByteLevel.alphabet()) <= set(model["vocab"])
    return bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))


NUM_STOPS = 4096
NO_MARKERS = "and no markers of thinking are known of this model (--thinking-markers names them)"


@dataclass(frozen=True)
class Chat:
    """Chat that is not yet tokenized."""

    messages: Sequence[Message]
    options: TemplateOptions | None


Asked = str | tuple[int, ...] | Chat
"""A prompt: a text, token ids or a chat."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt in tokens, and the last thinking marker in the start of the answer."""

    token_ids: list[int]
    last_marker: LastMarker | None = None


class TextCodec:
    """Model's tokenizer and thinking markers: the named ones, none for (), or the model's own.

    With `lenient_schemas`, grammars leave out keywords that they cannot hold. With `plain_content`, texts of prompts
    and messages that spell a control token stay texts.

    Raises ModelError if no tokenizer loads, for impossible markers, or if it cannot keep such texts apart.
    """

    def __init__(
        self,
        files: ModelFiles,
        thinking_markers: ThinkingMarkers = None,
        clock: str | None = None,
        lenient_schemas: bool = False,
        plain_content: bool = False,
    ) -> None:
        try:
            self._tokenizer = loaded_tokenizer(files)
        except ImportError as error:  # the library is optional
            raise ModelError(f"model {files.name}: {error}") from None
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(
                f"model {files.name}: its tokenizer cannot be loaded from {files.path}: {words_of(error)}; "
                "expected files that this version of transformers and tokenizers can read"
            ) from error
        self._lenient_schemas = lenient_schemas
        self._max_positions, self._vocab_size = files.max_positions, files.vocab_size
        self._eos_token_ids = eos_token_ids_of(files)
        self._idle_stop = lru_cache(NUM_STOPS)(self._found_idle_stop)
        is_tekken = isinstance(self._tokenizer, TekkenTokenizer)
        self._plain = None
        if plain_content and not is_tekken:  # mistral-common keeps texts and tokens apart
            self._plain = PlainContent(self._tokenizer, files.name, self._is_the_library_s)
        self.chat = TekkenChat(self._tokenizer) if is_tekken else ChatTemplate(self._tokenizer, clock)
        self.markers = self._found_markers(files, thinking_markers)

    def prompt_of(self, job: Job) -> EncodedPrompt:
        """Return a job's prompt. Raises ValueError as `encode_one` does."""
        chat = None if job.messages is None else Chat(job.messages, job.template)
        return self.encode_one(chat or job.prompt_ids or job.prompt or "")

    def encode_one(self, asked: Asked) -> EncodedPrompt:
        """Return one prompt. Raises ValueError, for the user."""
        [found] = self.encode_all([asked])
        if isinstance(found, ValueError):
            raise found
        return found

    def encode_all(
        self, asked: Sequence[Asked], are_cut: Iterable[bool] = repeat(False)
    ) -> list[EncodedPrompt | ValueError]:
        """Return each prompt, or the error that `encode_one` would raise; one batch is cheaper.

        Prompts that `are_cut` later may be of any length.
        """
        given = [self._kept_plain(each) for each in asked]
        self.chat.prepare((each.messages, each.options) for each in given if isinstance(each, Chat))
        begun = [self._begun_with(each, is_cut) for each, is_cut in zip(given, are_cut, strict=False)]
        texts: dict[type, list[str]] = {str: [], Chat: []}  # a template writes its own special tokens
        for own, text in zip(given, begun, strict=True):
            if isinstance(text, str):
                texts[type(own)].append(text)
        tokens = {
            str: map(self._with_one_bos, self.encode_many(texts[str], add_special_tokens=True)),
            Chat: iter(self.encode_many(texts[Chat], add_special_tokens=False)),
        }
        found = [
            next(tokens[type(own)]) if isinstance(each, str) else each for own, each in zip(given, begun, strict=True)
        ]
        return [self._prompt_or_error(*each) for each in zip(given, begun, found, strict=True)]

    def _kept_plain(self, asked: Asked) -> Asked | ValueError:
        """Return a prompt; with the run's `--plain-content`, its texts cannot become control tokens."""
        if self._plain is None or isinstance(asked, tuple):
            return asked
        try:
            if isinstance(asked, str):
                return self._plain.broken(asked)
            return Chat(self._plain.messages(asked.messages), self._plain.options(asked.options))
        except ValueError as error:
            return error

    def _begun_with(self, asked: Asked | ValueError, is_cut: bool) -> list[int] | ValueError | str:
        """Return tokens if they are given, otherwise the text to encode, or an error."""
        try:
            if isinstance(asked, ValueError):
                return asked
            if isinstance(asked, Chat):
                if (token_ids := self.chat.own_tokens(asked.messages, asked.options)) is not None:
                    return token_ids
                text = self.chat.render(asked.messages, asked.options)
                self.chat.refuse_lost(asked.messages, asked.options, text)
            elif isinstance(asked, tuple):
                return self._known(asked)
            else:
                text = asked
            if not is_cut:
                self._refuse_far_too_long(text)
        except ValueError as error:
            return error
        return text

    def cut(self, prompt: EncodedPrompt, num_tokens: int) -> EncodedPrompt:
        """Keep the last tokens of a prompt, and its marker if that is among them."""
        if len(prompt.token_ids) <= num_tokens:
            return prompt
        token_ids = prompt.token_ids[-num_tokens:]
        return EncodedPrompt(token_ids, prompt.last_marker and self.encode_one(tuple(token_ids)).last_marker)

    def _known(self, token_ids: tuple[int, ...]) -> list[int]:
        if (most := max(token_ids)) >= self._vocab_size:
            raise ValueError(f"prompt: found the token id {most:,}, expected ids below {self._vocab_size:,}")
        return list(token_ids)

    def encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode texts in one batch if the class encodes as the library does."""
        if self._plain is not None and any(BREAK in text for text in texts):
            return [self.encode(text, add_special_tokens) for text in texts]
        first = [self.encode(text, add_special_tokens) for text in texts[:1]]  # also sets the library's options
        if not self._is_the_library_s:
            return first + [self.encode(text, add_special_tokens) for text in texts[1:]]
        if len(texts) < 2:
            return first
        if self._words is not None and self._words.encode(texts[:1], add_special_tokens) == first:
            return first + self._words.encode(texts[1:], add_special_tokens)
        many = self._tokenizer.backend_tokenizer.encode_batch_fast(texts[1:], add_special_tokens=add_special_tokens)
        return first + [each.ids for each in many]

    @cached_property
    def _words(self) -> WordTokens | None:
        library = self._tokenizer.backend_tokenizer
        return WordTokens(library) if cuts_at_spaces(library) else None

    @cached_property
    def _is_the_library_s(self) -> bool:
        from transformers import PreTrainedTokenizerFast

        method = "_encode_plus"  # called by `encode`, and overridden by few kinds of models
        own = getattr(type(self._tokenizer), method, None)
        return own is not None and own is getattr(PreTrainedTokenizerFast, method, None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._plain is not None and BREAK in text:
            return self._plain.encode(text, add_special_tokens)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each word, with and without a space before it, as in vLLM.

        Raises ValueError for a word without tokens of the model.
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

    def with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        found = {self._special_tokens[each] for each in params.stop if each in self._special_tokens}
        if not found:
            return params
        return params.model_copy(update={"stop_token_ids": tuple(sorted(found.union(params.stop_token_ids)))})

    def without_effect(self, prompts: Sequence[str | tuple[int, ...]], stop: tuple[str, ...]) -> set[str]:
        """Return what has no effect: an added BOS token, and impossible stop texts."""
        found = {self._idle_stop(each) for each in stop} - {""}
        bos = self._added_bos
        begun = [each for each in prompts if bos is not None and isinstance(each, str) and each.startswith(bos)]
        if begun and self._plain is None:
            found.add(f"prompt: {bos} at its start, which the tokenizer adds itself")
        return found

    def thinking(self, job: Job, last: LastMarker | None) -> Thinking | None:
        """Return the thinking of a job's output; None if the model is not known to think."""
        if self.markers is None:
            return None
        opening: Opening = "anywhere"
        if job.sampling.structured_outputs is not None or (job.template and job.template.must_call):  # after a thought
            is_new = job.messages is not None and not (job.template and job.template.continue_final_message)
            opening = "first" if is_new and last is None else "never"
        return Thinking(self.markers, last == "start", opening)

    def rules(
        self, params: SamplingParams, thinking: Thinking | None = None, template: TemplateOptions | None = None
    ) -> tuple[Rule, ...]:
        """Return the rules for an output. Raises ConstraintError, a ValueError for the user, for impossible rules."""
        budget, structure = params.thinking_token_budget, params.structured_outputs
        if budget is not None and self.markers is None:
            raise ConstraintError(
                f"field 'thinking_token_budget': found {budget}, and no markers of thinking are known of this model; "
                "expected no such field, or a run with --thinking-markers"
            )
        if params.thinking_end == "close" and self.markers is None:
            raise ConstraintError(f"field 'thinking_end': found 'close', {NO_MARKERS}; expected no such field")
        text = self._rule_of_calls(template) if structure is None else self._grammars.grammar(structure)
        thinks = thinking is not None and (thinking.is_open or thinking.opening != "never")
        if thinking is None or not thinks or (budget is None and text is None):
            return () if text is None else (text,)
        return (ThinkingRule(thinking, budget, text),)

    def _rule_of_calls(self, template: TemplateOptions | None) -> Rule | None:
        """Return the rule of a text that must be calls. Raises ConstraintError."""
        if template is not None and template.tools and self.call_form is None:
            raise ConstraintError(UNKNOWN_FORM)
        if template is None or self.call_form is None or not template.must_call:
            return None
        return rule_of_calls(self.call_form, template, self._tokenizer, self._grammars)

    def ignored_keywords(self, params: SamplingParams) -> tuple[str, ...]:
        """Return the keywords of an output's schema that its grammar does not hold."""
        structure = params.structured_outputs
        return () if structure is None or not self._lenient_schemas else self._grammars.grammar(structure).ignored

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text without special tokens."""
        return self.output_text.decode(list(map(int, token_ids)))

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        return self.output_text.offsets(token_ids)[:-1]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, also of special ones; none for an unknown token."""
        return self._bytes.of(token_id)

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        """Remove an added BOS token before another one."""
        is_there_twice = self._added_bos is not None and len(token_ids) > 1 and token_ids[0] == token_ids[1]
        return token_ids[1:] if is_there_twice else token_ids

    def _prompt_or_error(
        self, asked: Asked | ValueError, begun: list[int] | str | ValueError, found: list[int] | ValueError
    ) -> EncodedPrompt | ValueError:
        if isinstance(asked, ValueError):
            return asked
        if isinstance(found, ValueError):
            return found
        try:
            text = begun if isinstance(begun, str) else None
            return EncodedPrompt(self._checked(found), self._last_marker(asked, text, found))
        except ValueError as error:
            return error

    def _found_idle_stop(self, text: str) -> str:
        """Return why a stop text is impossible; "" if it is possible."""
        if text in self._special_tokens:
            return ""
        named = [each for each in self._special_tokens if each in text and len(each) > 2]
        if named and not set(self.encode(text, add_special_tokens=False)).isdisjoint(self._special_tokens.values()):
            return f"stop: {max(named, key=len)} with more around it, though texts do not show special tokens"
        if self._steps is not None and not set(text.replace(BROKEN_CHARACTER, "").encode()) <= self._written_bytes:
            return "stop: a text with characters that no token has"
        return ""

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        if isinstance(self._tokenizer, TekkenTokenizer):
            return self._tokenizer.get_vocab()
        entries = self._tokenizer.added_tokens_decoder.items()
        return {str(token): number for number, token in entries if token.special and number < self._vocab_size}

    @cached_property
    def _written_bytes(self) -> set[int]:
        found = set[int]()
        for token_id in range(self._vocab_size):
            found.update(self._bytes[token_id])
            if len(found) == 256:
                break
        return found

    @cached_property
    def _added_bos(self) -> str | None:
        """Return the BOS token, if the tokenizer adds one."""
        bos = getattr(self._tokenizer, "bos_token", None)
        return str(bos) if bos and self.encode("a")[:1] == [self._tokenizer.bos_token_id] else None

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise ValueError("prompt: no tokens come of it; expected at least one")
        if (most := max(token_ids)) >= self._vocab_size:
            raise ValueError(
                f"prompt: token {most:,} ({self._tokenizer.convert_ids_to_tokens(most)!r}) comes of it, and the model "
                f"has {self._vocab_size:,} tokens; its tokenizer is larger than its config.json says (vocab_size)"
            )
        return token_ids

    def _found_markers(self, files: ModelFiles, named: ThinkingMarkers) -> Markers | None:
        if named is not None and len(named) == 0:
            return None
        try:
            encode = partial(self.encode, add_special_tokens=False)
            return markers_of(self._tokenizer, encode, files.vocab_size, named)
        except ValueError as error:
            raise ModelError(f"model {files.name}: {error}") from None

    def _last_marker(self, asked: Asked, text: str | None, token_ids: list[int]) -> LastMarker | None:
        """Return the last marker in a prompt; in a chat only the answer counts."""
        if self.markers is None:
            return None
        if isinstance(asked, Chat) and asked.options is not None and asked.options.continue_final_message:
            return self.markers.last_in(asked.messages[-1].content)
        if text is None:
            text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        if not isinstance(asked, Chat) or self.markers.last_in(text) is None:
            return self.markers.last_in(text)
        before = self.chat.without_answer(asked.messages, asked.options)
        common = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
        return self.markers.last_in(text, sum(1 for _ in common))

    def _refuse_far_too_long(self, text: str) -> None:
        if len(text) <= self._max_positions or self._max_chars_per_token is None:
            return
        num_tokens = -(-len(text) // self._max_chars_per_token)
        if num_tokens > self._max_positions:
            raise LineError(
                f"prompt: its {len(text):,} characters are at least {num_tokens:,} tokens, expected at most the "
                f"model's {self._max_positions:,}",
                "context_length_exceeded",
            )

    @cached_property
    def output_text(self) -> OutputText:
        return self._text_with(())

    @cached_property
    def marked_text(self) -> OutputText:
        """Return the text with the special tokens that mark calls of tools."""
        return self._text_with(() if self.call_form is None else self.call_form.marks)

    def _text_with(self, marks: tuple[str, ...]) -> OutputText:
        if self._steps is None:
            return LibraryText(lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=not marks)))
        return ByteText(self._bytes_with(marks) if marks else self._bytes, self._steps)

    @cached_property
    def call_form(self) -> CallForm | None:
        return form_of(self._tokenizer)

    @cached_property
    def _steps(self) -> DecoderSteps | None:
        if isinstance(self._tokenizer, TekkenTokenizer):
            return BYTES_AS_THEY_ARE
        return steps_of(self._tokenizer)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return self._bytes_with(())

    def _bytes_with(self, shown: tuple[str, ...]) -> TokenBytes:
        own = self._tokenizer
        return TekkenBytes(own, shown) if isinstance(own, TekkenTokenizer) else TokenBytes(own, self._steps, shown)

    @cached_property
    def textless_ids(self) -> tuple[int, ...]:
        """Return the ids unknown to the tokenizer, ascending, without those that end a text."""
        known: Container[int]
        if isinstance(self._tokenizer, TekkenTokenizer):
            known = range(self._tokenizer.num_tokens)
        else:
            known = {*self._tokenizer.get_vocab().values(), *self._tokenizer.added_tokens_decoder}
        return tuple(id_ for id_ in range(self._vocab_size) if id_ not in known and id_ not in self._eos_token_ids)

    @cached_property
    def _grammars(self) -> GrammarTokenizer:
        return GrammarTokenizer(self._tokenizer, self._vocab_size, self._eos_token_ids, self._lenient_schemas)

    @cached_property
    def _max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._tokenizer)
