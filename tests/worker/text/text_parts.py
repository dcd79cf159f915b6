"""Small tokenizers of all kinds, and their texts by definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.output_text import ByteText
from swiftbatch.worker.text.token_bytes import BYTE_OF, TokenBytes, steps_of
from swiftbatch.worker.text.tokenizer import TextCodec

SPACE = "\u2581"
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["the", "re", " ", " the", " \u4f60", "\u4f60\u597d", "\n", "\ufffd", "END", "EN", "D", "  "]
SPECIALS = ["<s>", "</s>", "<|im_end|>"]
CHARACTERS = "\u4f60\u00e9\U0001f642\ufffd aEND\u0939\u093f"
MORE = [more for size in (1, 2, 3) for more in product((0x80, 0x90, 0xA0, 0xBF), repeat=size)]
CHUNKS = [
    *CHARACTERS,
    b"\xe4\xbd",
    b"\xa0",
    b"\xff",
    b"\xf0\x9f",
    b"\xe0\x80",
    b"\xed\xa0\x80",
    b"\xc3",
    b"\xed\xa0",
    b"\xed",
]


@dataclass(frozen=True)
class Kind:
    tokenizer: PreTrainedTokenizerFast
    raw: Callable[[list[str]], bytes]  # the bytes of ordinary tokens' names
    byte_name: Callable[[int], str] | None = None  # the name of a byte's token; None without any

    @cached_property
    def output_text(self) -> ByteText:
        steps = steps_of(self.tokenizer)
        return ByteText(TokenBytes(self.tokenizer, steps), steps)

    def raw_of(self, token_ids: list[int]) -> bytes:
        return self.raw(self.names(token_ids))

    def text(self, token_ids: list[int]) -> str:
        return self.raw_of(token_ids).decode(errors="replace")

    def settled(self, token_ids: list[int]) -> str:
        """Return the text that no further byte can change."""
        text, parts = self.text(token_ids), segments(self.raw_of(token_ids))
        return text[:-1] if parts and is_begun(parts[-1]) else text

    def names(self, token_ids: list[int]) -> list[str]:
        names = self.tokenizer.convert_ids_to_tokens(token_ids)
        return [name for name in names if name is not None and name not in self.special]

    @cached_property
    def special(self) -> set[str]:
        return {str(each) for each in self.tokenizer.added_tokens_decoder.values() if each.special}

    def has_whole_runs(self, token_ids: list[int]) -> bool:
        """Return whether no run of byte tokens has an incomplete character, which the library may lose."""
        runs = groupby(self.names(token_ids), key=lambda name: name in BYTES)
        for is_bytes, run in runs:
            try:
                fallback_bytes(list(run)).decode() if is_bytes else None
            except UnicodeDecodeError:
                return False
        return True

    @cached_property
    def tokens(self) -> st.SearchStrategy[list[int]]:
        """Draw mostly bytes of characters, some too many or too few."""
        ids = range(len(self.tokenizer) + 1)  # the last is none
        one = st.sampled_from(ids).map(lambda token_id: [token_id])
        special = st.sampled_from(self.tokenizer.all_special_ids or ids).map(lambda token_id: [token_id])
        word_ids = [i for i in ids if self.tokenizer.convert_ids_to_tokens(i) in self.words]
        word = st.sampled_from(word_ids or ids).map(lambda token_id: [token_id])
        pieces = [one, special, word]
        if self.byte_name is not None:
            pieces += [st.sampled_from(CHUNKS).map(self.spelled)] * 4
        return st.lists(st.one_of(pieces), max_size=12).map(lambda lists: [each for part in lists for each in part])

    @cached_property
    def words(self) -> set[str]:
        return {*(_level_name(word) for word in WORDS), *(word.replace(" ", SPACE) for word in WORDS)}

    def spelled(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [int(self.tokenizer.convert_tokens_to_ids(self.byte_name(byte))) for byte in data]


def segments(data: bytes) -> list[bytes]:
    """Split as `errors="replace"` does, with broken characters as long as possible."""
    parts = []
    while data:
        sizes = [size for size in range(1, 5) if is_whole(data[:size]) or is_begun(data[:size])]
        parts.append(data[: max(sizes, default=1)])
        data = data[len(parts[-1]) :]
    return parts


def is_whole(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def is_begun(data: bytes) -> bool:
    """Return whether these bytes may begin a longer character."""
    return data[:1] >= b"\xc2" and any(is_whole(data + bytes(more)) for more in MORE)


def level_bytes(names: list[str]) -> bytes:
    known = [all(letter in BYTE_OF for letter in name) for name in names]
    return b"".join(
        bytes(BYTE_OF[letter] for letter in name) if is_known else name.encode()
        for name, is_known in zip(names, known, strict=True)
    )


def fallback_bytes(names: list[str]) -> bytes:
    return b"".join(
        bytes([BYTES.index(name)]) if name in BYTES else name.replace(SPACE, " ").encode() for name in names
    )


def stripped_bytes(names: list[str]) -> bytes:
    return fallback_bytes(names).removeprefix(b" ")


def metaspace_bytes(names: list[str]) -> bytes:
    return "".join(name.replace(SPACE, " " if number else "") for number, name in enumerate(names)).encode()


def fast(backend: Tokenizer, raw: Callable[[list[str]], bytes], byte_name: Callable[[int], str] | None) -> Kind:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=SPECIALS[0], eos_token=SPECIALS[1])
    return Kind(tokenizer, raw, byte_name)


def byte_fallback(has_strip: bool) -> Kind:
    """Make Llama 2's tokenizer, which strips a first space, or Gemma's."""
    names = [*SPECIALS[:2], "<unk>", *BYTES, *(word.replace(" ", SPACE) for word in WORDS[:-1])]
    backend = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if has_strip else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * has_strip)
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken(SPACE * 2, normalized=False), "[multimodal]"])
    return fast(backend, stripped_bytes if has_strip else fallback_bytes, BYTES.__getitem__)


def unigram() -> Kind:
    pieces = [*SPECIALS, "<unk>", *(word.replace(" ", SPACE) for word in WORDS), *CHARACTERS.replace(" ", "")]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))], 3, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    backend.decoder = decoders.Metaspace(SPACE, "always")
    backend.add_special_tokens(SPECIALS)
    return fast(backend, metaspace_bytes, None)


def byte_level(specials_first: int = 0, pattern: str | None = None) -> Kind:
    """Make GPT-2's tokenizer; with special tokens first as Mistral's, or a word pattern as tiktoken's."""
    first = [*SPECIALS, *(f"<SPECIAL_{number}>" for number in range(specials_first))]
    words = (_level_name(word) for word in WORDS)
    names = dict.fromkeys([*first, *LETTER_OF.values(), *words])
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], ignore_merges=pattern is not None))
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=not split)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(first)
    backend.add_tokens(["<tool call>", "\u25c1think\u25b7", "\u00e9t\u00e9"])  # the last one reads as byte letters
    return fast(backend, level_bytes, LETTER_OF.__getitem__)


def embedded() -> Kind:
    return Kind(TextCodec(locate_model("embedded"))._tokenizer, level_bytes, LETTER_OF.__getitem__)


def _level_name(text: str) -> str:
    return "".join(LETTER_OF[byte] for byte in text.encode())


KINDS = {
    "byte level": byte_level(),
    "byte fallback, a space in front": byte_fallback(has_strip=True),
    "byte fallback": byte_fallback(has_strip=False),
    "unigram": unigram(),
    "tekken": byte_level(specials_first=20, pattern=r"\p{L}+|\P{L}+"),
    "tiktoken": byte_level(pattern=r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"),
    "embedded": embedded(),
}
