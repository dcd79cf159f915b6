from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.text.token_bytes import BYTE_OF, TokenBytes, steps_of
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.text.text_parts import KINDS

TEXTS = ["The quick", "na\u00efve \u2013 caf\u00e9", "\U0001f642\U0001f469\u200d\U0001f680", "\u4e2d\u6587\n\t x"]


@pytest.fixture(scope="module")
def codec(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


@given(text=st.sampled_from(TEXTS) | st.text(max_size=20))
def test_the_bytes_of_a_text_s_tokens_are_the_text(codec: TextCodec, text: str) -> None:
    token_ids = codec.encode(text, add_special_tokens=False)
    assert b"".join(codec.token_bytes(each) for each in token_ids).decode() == codec.decode(token_ids) == text


def test_byte_level_vocabularies_have_every_byte_once() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert BYTE_OF.keys() == set(pre_tokenizers.ByteLevel.alphabet())


def test_special_tokens_are_named_and_no_part_of_texts_and_unknown_ones_are_nothing(codec: TextCodec) -> None:
    assert (codec.token_bytes(0), codec.token_bytes(10**6)) == (b"<|endoftext|>", b"")
    assert [codec._bytes.is_in_text(each) for each in (0, 1, 10**6)] == [False, True, False]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    names = ["<s>", "\u2581the", "re", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_of_sentencepiece_a_space_stays_and_bytes_are_bytes() -> None:
    tokenizer = sentencepiece_like()
    tokens = TokenBytes(tokenizer, steps_of(tokenizer))
    assert [tokens.of(each) for each in (0, 1, 2, 3 + 0xE2)] == [b"<s>", b" the", b"re", b"\xe2"]
    assert not tokens.is_in_text(0)
    token_ids = [1, 2, *(3 + byte for byte in "\u2013".encode())]
    assert b" " + tokenizer.decode(token_ids).encode() == b"".join(tokens.of(each) for each in token_ids)


@pytest.mark.parametrize(("name", "shown"), [("byte fallback", b"  "), ("byte level", b"<tool call>")])
def test_an_added_token_is_what_texts_have_of_it(name: str, shown: bytes) -> None:
    kind = KINDS[name]
    tokens = TokenBytes(kind.tokenizer, steps_of(kind.tokenizer))
    added = [token_id for token_id, token in kind.tokenizer.added_tokens_decoder.items() if not token.special]
    assert tokens.of(added[0]) == shown
    for token_id in added:
        assert tokens.of(token_id).decode(errors="replace") == kind.tokenizer.decode([token_id])


def words(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "house": 1, "##boat": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_of_words_a_token_has_the_space_in_front_of_it_and_not_the_sign_of_a_part() -> None:
    tokenizer = words(decoders.WordPiece())
    tokens = TokenBytes(tokenizer, steps_of(tokenizer))
    assert [tokens.of(each) for each in (1, 2)] == [b" house", b"boat"]
    assert [tokens.of(each, is_first=True) for each in (1, 2)] == [b"house", b"##boat"]


def test_of_another_kind_a_token_is_what_it_is_decoded_to() -> None:
    tokenizer = words(decoders.BPEDecoder("se"))
    assert steps_of(tokenizer) is None
    assert [TokenBytes(tokenizer, None).of(each) for each in (1, 2)] == [b"hou", b"##boat"]
