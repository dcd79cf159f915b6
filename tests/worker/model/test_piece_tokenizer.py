"""Models whose only tokenizer is `tokenizer.model` work with sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import import_protobuf

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text import tokenizer_loading
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.model.paper_configs import pickle_weights, publish

PIECES = (
    "\u2581",
    "t",
    "h",
    "e",
    "c",
    "a",
    "he",
    "the",
    "\u2581the",
    "at",
    "cat",
    "\u2581cat",
)  # longer ones are better
FIRST = 3 + 256  # behind special tokens and bytes
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish("Vicuna 7B v1.3", tmp_path, vocab_size=FIRST + len(PIECES))
    pickle_weights(tmp_path)
    said = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "sp_model_kwargs": {}, **NAMES}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    known = import_protobuf()
    proto, types = known.ModelProto(), known.ModelProto.SentencePiece
    proto.pieces.add(piece="<unk>", score=0, type=types.UNKNOWN)
    for name in ("<s>", "</s>"):
        proto.pieces.add(piece=name, score=0, type=types.CONTROL)
    for byte in range(256):
        proto.pieces.add(piece=f"<0x{byte:02X}>", score=0, type=types.BYTE)
    for piece in PIECES:
        proto.pieces.add(piece=piece, score=len(piece), type=types.NORMAL)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = known.TrainerSpec.BPE, True
    proto.normalizer_spec.name, proto.normalizer_spec.remove_extra_whitespaces = "identity", False
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    return tmp_path


def test_a_tokenizer_of_pieces_reads_and_writes_texts(folder: Path) -> None:
    codec = TextCodec(locate_model(str(folder)))
    ids = {piece: FIRST + number for number, piece in enumerate(PIECES)}
    assert codec.encode("the cat") == [1, ids["\u2581the"], ids["\u2581cat"]]
    assert codec.encode("the x") == [1, ids["\u2581the"], ids["\u2581"], 3 + ord("x")]
    assert codec.decode(codec.encode("the cat\u00e9")[1:]) == "the cat\u00e9"


def test_without_the_library_a_line_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_loading, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        TextCodec(locate_model(str(folder)))
    assert str(caught.value) == (
        f"model {folder}: its only tokenizer is tokenizer.model, which the library sentencepiece reads, and "
        "sentencepiece is not installed here; install swiftbatch with its extra `sentencepiece`"
    )
    assert inspect_model(str(folder)).refusal is None


def test_a_tokenizer_s_pieces_are_part_of_the_model(folder: Path) -> None:
    before = locate_model(str(folder)).text_fingerprint
    (folder / "tokenizer.model").write_bytes(b"other")
    assert locate_model(str(folder)).text_fingerprint != before
