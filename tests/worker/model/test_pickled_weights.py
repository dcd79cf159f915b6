"""Weights in `pytorch_model.bin` are those of safetensors, or refused in a line."""

from __future__ import annotations

import json
import os
import pickle
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.quantized_weights import Weight
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.file_checks import INDEX_FILE, PICKLED_FILE, PICKLED_INDEX, SINGLE_FILE
from swiftbatch.worker.model.model_files import OtherModelError, locate_model
from swiftbatch.worker.model.weight_files import read_tensors
from swiftbatch.worker.quantizing import quantize_model
from tests.worker.model.paper_configs import pickle_weights, publish
from tests.worker.model.test_dense_loading import tensors_of

MODEL = "Vicuna 7B v1.3"
HALF, F32 = torch.float16, torch.float32


class Command:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch called",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(MODEL, tmp_path, HALF)
    return tmp_path


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found = dense_weights(locate_model(str(folder)), F32)
    assert found is not None
    return {name: each for name, each in tensors_of(found).items() if each is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pickled_weights_are_those_of_safetensors(folder: Path, num_shards: int) -> None:
    expected, told = weights_in(folder), inspect_model(str(folder))
    fingerprint = locate_model(str(folder)).fingerprint
    pickle_weights(folder, num_shards)
    assert_same(weights_in(folder), expected)
    assert inspect_model(str(folder)) == told
    assert locate_model(str(folder)).fingerprint != fingerprint


def test_where_both_are_safetensors_are_read(folder: Path) -> None:
    fingerprint, tensors = locate_model(str(folder)).fingerprint, load_file(folder / SINGLE_FILE)
    pickle_weights(folder)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / PICKLED_INDEX).write_text("{}")
    assert locate_model(str(folder)).fingerprint == fingerprint
    (folder / SINGLE_FILE).rename(folder / "model-1.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    assert "model-1.safetensors" in locate_model(str(folder)).digests.model


def test_tensors_that_share_numbers_or_are_transposed_are_read_as_they_are(folder: Path) -> None:
    expected, tensors = weights_in(folder), load_file(folder / SINGLE_FILE)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]
    torch.save({**tensors, name: tensors[name].T.contiguous().T}, folder / PICKLED_FILE)
    (folder / SINGLE_FILE).unlink()
    found = weights_in(folder)
    assert torch.equal(found["1 up w"], found["0 up w"])
    assert_same({"0 query w": found["0 query w"]}, {"0 query w": expected["0 query w"]})
    assert found["1 up w"].untyped_storage().data_ptr() != found["0 up w"].untyped_storage().data_ptr()


def test_a_fingerprint_has_the_weights_and_the_index(folder: Path) -> None:
    pickle_weights(folder, 2)
    files = locate_model(str(folder))
    index = json.loads((folder / PICKLED_INDEX).read_text())
    (folder / PICKLED_INDEX).write_text(json.dumps(index | {"metadata": {}}))
    assert files.digests.difference({**locate_model(str(folder)).digests.model}) is not None
    assert [name for name in files.digests.model if name.endswith(".bin")] == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]


def test_a_worker_with_other_weights_refuses_when_it_loads_them(folder: Path) -> None:
    pickle_weights(folder)
    files = locate_model(str(folder), known_weights={PICKLED_FILE: "0" * 64})
    with pytest.raises(OtherModelError, match=rf"{PICKLED_FILE} is not the file that was expected"):
        dense_weights(files, F32)


def test_one_tensor_is_in_memory_beside_those_that_are_kept(folder: Path) -> None:
    pickle_weights(folder)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def placed(weight: Weight) -> Weight:
        nonlocal most
        assert isinstance(weight, torch.Tensor)
        alive.add(weight)
        most = max(most, len(alive))
        return weight.to("meta")

    assert len(read_tensors(locate_model(str(folder)), HALF, placed)) > 10
    assert most <= 2


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "is damaged or cut off ("),
    "empty": (lambda file: file.write_bytes(b""), "is no file of torch.save, or one of torch before 1.6; copy it"),
    "a pointer": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "is no file of torch"),
    "a plain pickle": (lambda file: file.write_bytes(pickle.dumps({"a": 1})), "is no file of torch.save"),
    "an old form": (
        lambda file: torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False),
        "is no file of torch.save, or one of torch before 1.6",
    ),
    "another archive": (lambda file: zipfile.ZipFile(file, "w").writestr("a", "b"), "is damaged or cut off ("),
    "damaged at its beginning": (
        lambda file: file.write_bytes(file.read_bytes()[:300] + b"\xff" * 300 + file.read_bytes()[600:]),
        "is damaged or cut off (",
    ),
    "a list": (lambda file: torch.save([torch.ones(2)], file), "holds a list, expected tensors by name"),
    "a nested state": (lambda file: torch.save({"model": {}}, file), "holds model as dict, expected tensors by name"),
    "names that are none": (lambda file: torch.save({3: torch.ones(2)}, file), "holds 3 as Tensor, expected tensors"),
    "a sparse tensor": (
        lambda file: torch.save({"a": torch.ones(2, 2).to_sparse()}, file),
        "holds a as torch.sparse_coo, expected plain tensors",
    ),
    "a call": (
        lambda file: torch.save({"a": Command()}, file),
        f"asks for {os.system.__module__}.system, and weights need tensors alone, so it is not read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_or_foreign_file_is_refused_in_a_line_and_runs_nothing(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle_weights(folder)
    monkeypatch.chdir(folder)
    harm, words = FAULTS[fault]
    harm(folder / PICKLED_FILE)
    for look in (locate_model, inspect_model):
        with pytest.raises(ModelError, match=r"\A.*\Z") as caught:
            look(str(folder))
        assert f"{folder / PICKLED_FILE} {words}" in str(caught.value)
        assert len(str(caught.value)) < 700
    assert not (folder / "called").exists()


def test_a_shard_that_is_missing_is_named_with_its_index(folder: Path) -> None:
    pickle_weights(folder, 2)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    words = f"{folder / PICKLED_INDEX} names pytorch_model-00002-of-00002.bin, which is no file of this folder"
    with pytest.raises(ModelError, match=rf"\A.*{words}.*\Z"):
        locate_model(str(folder))
    assert words in str(inspect_model(str(folder)).refusal)


def test_a_pickled_model_is_quantized_to_safetensors(folder: Path, tmp_path: Path) -> None:
    made = {}
    for form in ("safetensors", "bin"):
        quantize_model(locate_model(str(folder)), "int8", tmp_path / form)
        made[form] = (tmp_path / form / SINGLE_FILE).read_bytes()
        pickle_weights(folder)
    assert made["bin"] == made["safetensors"]
    assert not list((tmp_path / "bin").glob("*.bin*"))
