"""Truncated downloads with reserved room are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.file_checks import BLOCK, zero_tail_fault
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import LLAMA, llama_tensors, load, make_packed, write_mxfp4, written
from tests.worker.model.gguf.tiny_gguf import MIXED, write_tiny
from tests.worker.model.kind_parts import save_tiny, tiny_config

PART_ENDS = ("weight", "_packed", "qweight", "_blocks")  # ends of the coded parts' names
SCALES = ("scale", "scale_inv", "scales")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def cut_off(file: Path, share: float) -> None:
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(int(size * share))
        stream.truncate(size)


def refusal(model: Path) -> str:
    """Return the line of `inspect` and runs."""
    with pytest.raises(ModelError) as caught:
        locate_model(str(model))
    said = str(caught.value).removeprefix(f"model {model}: ")
    assert inspect_model(str(model)).refusal == said
    assert "\n" not in said
    return said


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [*EXAMPLES, "MXFP4 experts"])
def test_a_file_of_any_format_that_was_cut_off_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    if name in EXAMPLES:
        make_packed(EXAMPLES[name], folder)
    else:
        write_mxfp4(tmp_path, {**LLAMA}, {"model.layers.0.mlp.experts.down_proj": torch.ones(4, 512, 96)})
    for file in weight_files(folder):
        assert zero_tail_fault([file]) is None
        whole = file.read_bytes()
        for share in (0.6, 0.8):
            cut_off(file, share)
            assert f"{file} has zeros in place of its end, " in (zero_tail_fault([file]) or ""), share
        file.write_bytes(whole)


@pytest.mark.parametrize("share", [0.97, 0.6])
def test_a_gguf_file_that_was_cut_off_is_refused_by_its_own_name(share: float, tmp_path: Path) -> None:
    file, _ = write_tiny("llama", tmp_path, torch.bfloat16)
    assert inspect_model(str(file)).refusal is None
    cut_off(file, share)
    assert refusal(file).startswith(f"{file} has zeros in place of its end, ")


def test_one_of_several_files_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA, {name: each + 1 for name, each in llama_tensors(torch.Generator()).items()})
    cut_off(folder / "model-1.safetensors", 0.6)
    assert refusal(folder).startswith(f"{folder / 'model-1.safetensors'} has zeros in place of its end, ")


def test_zeros_that_models_are_published_with_are_no_fault(tmp_path: Path) -> None:
    """Padded matrix ends, biases after them, and norms stored minus one."""
    padded = torch.randn(64, 256)
    padded[40:] = 0
    sound = {"a.weight": padded, "b.bias": torch.zeros(4 * BLOCK), "c.qzeros": torch.zeros(64, 64, dtype=torch.int32)}
    for tensors in (sound, {"a.weight": padded}, {"a.weight": torch.ones(9, 9), "b_norm.weight": torch.zeros(BLOCK)}):
        save_file(tensors, tmp_path / "model.safetensors")
        assert zero_tail_fault([tmp_path / "model.safetensors"]) is None
    padded[30:] = 0
    save_file({"a.weight": padded}, tmp_path / "model.safetensors")
    assert zero_tail_fault([tmp_path / "model.safetensors"]) is not None


def test_a_small_model_with_zero_biases_and_norms_loads(tmp_path: Path) -> None:
    for kind in ("gemma3_text", "qwen2"):
        save_tiny(tiny_config(kind, has_wide_heads=True), tmp_path / kind)
        file = tmp_path / kind / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("bias") or (kind.startswith("gemma") and "norm" in name):
                tensor.zero_()
        save_file(tensors, file, metadata={"format": "pt"})
        load(tmp_path / kind, "bfloat16")


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_matrix_without_numbers_in_the_middle_is_refused_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    """Its codes are zeros, whatever they stand for, or its scales are."""
    for number, ends in enumerate((PART_ENDS, SCALES)):
        folder, _ = make_packed(EXAMPLES[name], tmp_path / str(number))
        for file in weight_files(folder):
            tensors = load_file(file)
            for part in (part for part in tensors if ".up_proj." in part and part.endswith(ends)):
                tensors[part] = torch.zeros(tensors[part].shape, dtype=tensors[part].dtype)
            save_file(tensors, file, metadata={"format": "pt"})
        if number and name == "compressed-tensors MXFP4":  # a zero byte is the scale 2**-127
            continue
        words = r"has (zeros in place of its end, |nothing but zeros in )model.*up_proj"
        words += "|its scales are not finite" if "NVFP4" in name else ""
        with pytest.raises(ModelError, match=words):
            load(folder, "bfloat16")


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", MIXED)
def test_a_matrix_of_zeros_in_a_gguf_file_is_refused_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    file, _ = write_tiny("llama", tmp_path, torch.bfloat16, types=(kind,))
    [tensor] = [each for each in GGUFReader(file).tensors if each.name == "blk.0.ffn_up.weight"]
    with file.open("r+b") as stream:
        stream.seek(int(tensor.data_offset))
        stream.write(bytes(int(tensor.n_bytes)))
    with pytest.raises(ModelError, match=r"nothing but zeros in model\.layers\.0\.mlp\.up_proj\.weight: it was cut"):
        TargetModel.load(locate_model(str(file)), "bfloat16", "cpu")


def test_equal_logits_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"^model .*: its logits are all equal, whichever token they follow"):
        load(folder, "bfloat16")


def test_a_file_of_the_hub_s_cache_that_changed_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "snapshots" / "1"))
    weights, blobs = folder / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    known = locate_model(str(folder)).digests.model
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    for expected in (known, {}):
        with pytest.raises(ModelError, match=rf"{weights} is damaged: its source has SHA-256 {blob.name[:12]}, found "):
            load_known(folder, expected)


def load_known(folder: Path, known: Mapping[str, str]) -> None:
    TargetModel.load(locate_model(str(folder), known), "bfloat16", "cpu")


def test_a_header_that_lies_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    header = json.dumps({"a": {"data_offsets": [0]}}).encode()
    for data in (
        b"",
        bytes(BLOCK),
        len(header).to_bytes(8, "little") + header + bytes(BLOCK),
        b"\xff" * 9 + bytes(BLOCK),
    ):
        for name in ("a.safetensors", "a.gguf"):
            (tmp_path / name).write_bytes(data)
            assert zero_tail_fault([tmp_path / name]) is None
