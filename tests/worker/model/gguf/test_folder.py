"""A GGUF file is found, hashed and compared like any model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoTokenizer

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Message
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.gguf.gguf_model import link_names
from swiftbatch.worker.model.model_files import (
    CONFIG_FILES,
    OtherModelError,
    eos_token_ids_of,
    locate_model,
    model_folder,
)
from swiftbatch.worker.model.weight_files import read_tensors
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.model.gguf.tiny_gguf import TOKENS, finish, write_tiny

BF16 = torch.bfloat16
TEXTS = ("the inner\n\n  <|im_end|> then 2024", "", " ", "Ünïcode 日本 🙂", "<|endoftext|>the")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "swiftbatch" / "gguf"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny("llama", tmp_path_factory.mktemp("stored"), BF16)


@pytest.fixture
def file(stored: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(stored[0], tmp_path / "some.gguf"))


def test_the_tokenizer_is_that_of_transformers(file: Path) -> None:
    ours = TextCodec(locate_model(str(file)))
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    for text in TEXTS:
        token_ids = theirs.encode(text)
        assert ours.encode(text) == token_ids
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    message = {"role": "user", "content": "the inner"}
    rendered = theirs.apply_chat_template([message], tokenize=False)
    assert ours.chat.render([Message(**message)], None) == rendered == "user: the inner<|im_end|>assistant: "


def test_a_text_ends_at_what_the_file_says(file: Path) -> None:
    assert eos_token_ids_of(locate_model(str(file))) == {TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")}


def test_matrices_stay_packed_for_the_kernels(file: Path) -> None:
    weights = dense_weights(locate_model(str(file)), BF16)
    assert weights is not None
    found = read_tensors(locate_model(str(file)), BF16, lambda weight: weight)
    assert sum(isinstance(weight, PackedMatrix) for weight in found.values()) == 13


def test_a_model_is_the_same_under_another_name(file: Path, cache: Path) -> None:
    first = locate_model(str(file))
    other = locate_model(str(file.rename(file.with_name("other.gguf"))))
    assert first.path != other.path
    assert first.fingerprint == other.fingerprint
    assert first.digests == other.digests


def test_bytes_that_change_are_told_by_the_name_that_the_user_knows(file: Path) -> None:
    before = locate_model(str(file))
    data = bytearray(file.read_bytes())
    data[-500] ^= 1
    file.write_bytes(data)
    assert locate_model(str(file)).fingerprint != before.fingerprint
    known = locate_model(str(file), before.digests.model)
    with pytest.raises(OtherModelError, match=f"{file} is not the file that was expected"):
        read_tensors(known, BF16, lambda weight: weight)


def test_a_head_that_changes_makes_another_folder(file: Path, stored: tuple[Path, Path], tmp_path: Path) -> None:
    before = model_folder(str(file), CONFIG_FILES)
    other, _ = write_tiny("llama", tmp_path, BF16, **{"rope.freq_base": 70_000.0})
    file.write_bytes(other.read_bytes())
    after = model_folder(str(file), CONFIG_FILES)
    assert before != after
    assert json.loads((after / "config.json").read_text())["rope_theta"] == 70_000.0


def test_a_file_that_is_cut_off_meanwhile_is_refused(file: Path) -> None:
    files = locate_model(str(file))
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"can't be read as GGUF|is damaged or cut off"):
        read_tensors(files, BF16, lambda weight: weight)


def test_infinite_scales_are_refused_by_the_name_of_their_tensor(tmp_path: Path) -> None:
    file, _ = write_tiny("llama", tmp_path, BF16, types=("Q8_0",))
    reader = GGUFReader(file)
    place = next(each.data_offset for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"\x00\x7e")  # not a number
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight of Q8_0 can't be unpacked: found scales"):
        read_tensors(locate_model(str(file)), BF16, lambda weight: weight)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("llama", name) for name in ("blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight")),
        *(("gemma2", name) for name in ("blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight")),
        ("phi3", "blk.1.ffn_up.weight"),  # of gates and products, one below the other
    ],
)
def test_a_tensor_of_another_shape_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    file, _ = write_tiny(kind, tmp_path, BF16, types=("F32",))
    reader, other = GGUFReader(file), tmp_path / "other.gguf"
    writer = GGUFWriter(other, kind)
    _copy_fields(reader, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data[:-6] if tensor.name == name else tensor.data)
    finish(writer)
    with pytest.raises(ModelError):
        TargetModel.load(locate_model(str(other)), "bfloat16", "cpu")


def test_a_model_in_several_files_is_that_of_one(file: Path, stored: tuple[Path, Path], tmp_path: Path) -> None:
    first = split(file, tmp_path, 3)
    assert [each.name for each in sorted(first.parent.glob("many-*"))] == [
        f"many-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    whole, parts = (read_tensors(locate_model(str(each)), BF16, lambda weight: weight) for each in (file, first))
    assert whole.keys() == parts.keys()
    files = locate_model(str(first))
    assert [name for name in files.digests.model if name.endswith(".gguf")] == [
        f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(("part", "words"), [(2, "give the first one"), (3, "give the first one")])
def test_another_part_than_the_first_is_refused(part: int, words: str, file: Path, tmp_path: Path) -> None:
    first = split(file, tmp_path, 3)
    with pytest.raises(ModelError, match=words):
        locate_model(str(first.with_name(f"many-0000{part}-of-00003.gguf")))


def test_a_part_of_none_is_refused(file: Path) -> None:
    with pytest.raises(ModelError, match="one part of none"):
        locate_model(str(file.rename(file.with_name("some-00001-of-00000.gguf"))))


@pytest.mark.parametrize(
    "said", ["[]", "{", "{}", '{"files": 3}', '{"files": ["/etc/passwd"], "architecture": "llama"}']
)
def test_a_folder_with_a_file_of_the_same_name_is_not_taken_for_one_of_ours(said: str, tmp_path: Path) -> None:
    (tmp_path / "gguf.json").write_text(said)
    assert link_names(tmp_path) == []


def test_a_part_that_is_missing_is_told(file: Path, tmp_path: Path) -> None:
    first = split(file, tmp_path, 2)
    first.with_name("many-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"its part .*many-00002-of-00002\.gguf is missing"):
        locate_model(str(first))


def test_inspect_tells_formats_without_torch_and_before_a_tokenizer_is_made(file: Path, cache: Path) -> None:
    found = inspect_model(str(file))
    assert found.refusal is None
    assert found.formats["Q4_1"] > 0
    assert found.cpu is not None
    assert found.cpu.name == "kernels"
    assert found.has_chat_template
    assert not list(cache.glob("*/tokenizer.json"))
    program = f"import sys; from swiftbatch.worker.inspection import inspect_model; inspect_model({str(file)!r})"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'torch' not in sys.modules"], check=True)


def test_two_at_once_make_one_folder(file: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: model_folder(str(file)), range(4)))
    assert [*cache.iterdir()] == [*folders]


def test_a_cache_that_cannot_be_written_is_told(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"its small files can't be kept in .*; set XDG_CACHE_HOME"):
        model_folder(str(file), CONFIG_FILES)


@pytest.mark.parametrize(("key", "value"), [("pre", "some-other"), ("model", "bert")])
def test_a_tokenizer_that_cuts_otherwise_is_refused(key: str, value: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    said = {"model": "gpt2", "pre": "gpt-2"} | {key: value}
    writer.add_tokenizer_model(said["model"])
    writer.add_tokenizer_pre(said["pre"])
    finish(writer)
    with pytest.raises(ModelError, match=f"its tokenizer.ggml.{key} is '{value}', expected"):
        model_folder(str(tmp_path / "model.gguf"), CONFIG_FILES)


def split(file: Path, folder: Path, count: int) -> Path:
    """Split as llama.cpp does; return the first file."""
    reader = GGUFReader(file)
    for number in range(count):
        writer = GGUFWriter(folder / f"many-{number + 1:05}-of-{count:05}.gguf", "llama")
        if number == 0:
            _copy_fields(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[number::count]:
            raw = None if tensor.data.dtype != "uint8" else tensor.tensor_type
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=raw)
        finish(writer)
    return folder / f"many-00001-of-{count:05}.gguf"


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub)
