"""A damaged or hostile GGUF file is refused before its lengths are used."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.gguf.gguf_model import TYPES
from swiftbatch.worker.model.gguf.header import GGUFError, read_head
from swiftbatch.worker.model.model_files import CONFIG_FILES, locate_model, model_folder
from tests.worker.model.gguf.tiny_gguf import write_tiny

HUGE = 1 << 60
TEXT, UINT32, UINT64, ARRAY, FLOAT32 = 8, 4, 10, 9, 6


def text(value: str | bytes, size: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if size is None else size) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0, num_dimensions: int | None = None) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape) if num_dimensions is None else num_dimensions, *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def head(
    *parts: bytes, magic: bytes = b"GGUF", version: int = 3, num_tensors: int = 0, num_entries: int = 0, data: int = 0
) -> bytes:
    front = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(parts)
    return front + bytes(-len(front) % 32) + bytes(data)


def refused(tmp_path: Path, content: bytes) -> str:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        read_head(file)
    with pytest.raises(ModelError, match="no GGUF file that runs here") as shown:
        locate_model(str(file))
    assert "\n" not in str(shown.value)
    return str(caught.value)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "follow at 0"),
    "another magic": (head(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (head(version=1), "version is 1"),
    "version 4": (head(version=4), "version is 4"),
    "big-endian": (head(version=3 << 24), "big-endian"),
    "a count of tensors of 2^60": (head(num_tensors=HUGE, data=64), "counts 1,152,921,504,606,846,976"),
    "a count of entries of 2^60": (head(num_entries=HUGE, data=64), "counts 1,152,921,504,606,846,976"),
    "a key of 2^60 bytes": (head(text(b"", HUGE), num_entries=1, data=64), "a text of"),
    "a text of 2^60 bytes": (head(entry("a", TEXT, text(b"", HUGE)), num_entries=1, data=64), "a text of"),
    "a text behind the end": (head(entry("a", TEXT, text(b"", 9999)), num_entries=1, data=64), "9,999 bytes follow"),
    "a text that is not UTF-8": (head(entry("a", TEXT, text(b"\xff\xff")), num_entries=1, data=64), "not UTF-8"),
    "a list of 2^60 numbers": (
        head(entry("a", ARRAY, struct.pack("<IQ", UINT64, HUGE)), num_entries=1, data=64),
        "counts",
    ),
    "a list of 2^60 texts": (head(entry("a", ARRAY, struct.pack("<IQ", TEXT, HUGE)), num_entries=1, data=64), "counts"),
    "a list of lists": (
        head(entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1)), num_entries=1, data=64),
        "list of type 9",
    ),
    "a value of no type": (head(entry("a", 13, bytes(8)), num_entries=1, data=64), "of type 13"),
    "a key twice": (head(entry("a", UINT32, bytes(4)) * 2, num_entries=2, data=64), "says a twice"),
    "an alignment of nothing": (
        head(entry("general.alignment", UINT32, bytes(4)), num_entries=1, data=64),
        "general.alignment is 0",
    ),
    "a tensor without dimensions": (head(tensor("t", (), 0), num_tensors=1, data=64), "0 dimensions"),
    "a tensor of 2^31 dimensions": (
        head(tensor("t", (4,), 0, num_dimensions=1 << 31), num_tensors=1, data=64),
        "dimensions",
    ),
    "a tensor of 2^240 numbers": (head(tensor("t", (HUGE,) * 4, 0), num_tensors=1, data=64), "ends at byte"),
    "a tensor with an empty dimension": (head(tensor("t", (4, 0), 0), num_tensors=1, data=64), "the shape [0, 4]"),
    "a row of no whole blocks": (head(tensor("t", (33, 2), 0, 2), num_tensors=1, data=64), "Q4_0 has the shape"),
    "a tensor behind the end": (head(tensor("t", (64,), 0), num_tensors=1, data=255), "ends at byte 256"),
    "an offset of 2^63": (head(tensor("t", (4,), 1 << 63), num_tensors=1, data=64), "ends at byte"),
    "an offset between": (head(tensor("t", (4,), 4), num_tensors=1, data=64), "begins at 4"),
    "tensors that overlap": (
        head(tensor("t", (16,), 0), tensor("u", (16,), 32), num_tensors=2, data=128),
        "u begins at 32",
    ),
    "a tensor twice": (head(tensor("t", (8,), 0), tensor("t", (8,), 32), num_tensors=2, data=64), "t twice"),
    "a name of several lines": (head(tensor("t\nu", (4, 0), 0), num_tensors=1, data=64), "tensor t"),
    "a type that is not read": (head(tensor("t", (256,), 0, 17), num_tensors=1, data=64), "t is stored as IQ2_XS"),
    "a type that there is not": (head(tensor("t", (256,), 0, 999), num_tensors=1, data=64), "stored as type 999"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, words = DAMAGED[name]
    assert words in refused(tmp_path, content)


@pytest.mark.parametrize("key", TYPES)
def test_what_files_of_all_architectures_say_is_refused_in_another_type(key: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(head(entry(key, FLOAT32, struct.pack("<f", 1.5)), num_entries=1))
    with pytest.raises(ModelError, match=f"its metadata has {key} = 1.5, expected a"):
        locate_model(str(file))


def test_words_of_a_file_reach_no_terminal_as_commands(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(head(tensor("t\n\x1b[31m\u202e", (33, 2), 0, 2), num_tensors=1, data=64))
    with pytest.raises(ModelError, match=r"its tensor t \\x1b\[31m\\u202e of Q4_0") as caught:
        locate_model(str(file))
    assert str(caught.value).isprintable()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file, _ = write_tiny("llama", tmp_path_factory.mktemp("sound"), torch.bfloat16)
    return file.read_bytes()


def test_a_file_that_is_cut_off_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound)
    end = read_head(file).num_bytes
    for cut in (*range(0, end, 37), end, end + 1, len(sound) // 2):
        file.write_bytes(sound[:cut])
        with pytest.raises(GGUFError):
            read_head(file)


def test_any_bytes_in_a_head_are_taken_or_refused_in_one_line(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, rng = tmp_path / "model.gguf", random.Random(3)
    file.write_bytes(sound)
    end = read_head(file).num_bytes
    for _ in range(300):
        changed = bytearray(sound)
        for _ in range(rng.choice((1, 1, 3, 16))):
            changed[rng.randrange(end)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        file.write_bytes(changed)
        with contextlib.suppress(OneLine):
            taken(file)


class OneLine(Exception):  # noqa: N818 (no error of the product)
    pass


def taken(file: Path) -> None:
    """Raises OneLine at a proper refusal."""
    try:
        model_folder(str(file), CONFIG_FILES)
    except ModelError as error:
        if "\n" not in str(error):
            raise OneLine from None
        raise


def test_what_stands_behind_the_last_tensor_is_no_fault(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound + bytes(100))
    assert read_head(file).tensors


def test_a_head_is_not_read_beyond_its_end(sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.model.gguf.header.STEP", 64)
    file = tmp_path / "model.gguf"
    file.write_bytes(sound)
    found: Any = read_head(file)
    monkeypatch.undo()
    assert found.sha256 == read_head(file).sha256
