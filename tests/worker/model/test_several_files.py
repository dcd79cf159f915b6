"""Weights in several files are read and hashed at the same time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.worker.model import digests
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.file_checks import INDEX_FILE
from swiftbatch.worker.model.model_files import OtherModelError, locate_model
from swiftbatch.worker.model.weight_files import interleaved, read_tensors
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import make_packed

BF16 = torch.bfloat16


def split(folder: Path, num_files: int) -> None:
    """Deal a model's tensors out to files, so that the parts of a packed matrix lie in several."""
    tensors = {}
    for file in weight_files(folder):
        tensors |= load_file(file)
        file.unlink()
    places = {name: f"model-{number % num_files}.safetensors" for number, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        own = {name: tensor for name, tensor in tensors.items() if places[name] == place}
        save_file(own, folder / place, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("name", ["GPTQ int4", "compressed-tensors int4 with zeros"])
def test_a_matrix_in_parts_of_several_files_is_that_of_one(name: str, tmp_path: Path) -> None:
    folder = make_packed(EXAMPLES[name], tmp_path / "model")[0]
    expected = read_tensors(locate_model(str(folder)), BF16, lambda weight: weight)
    split(folder, 7)
    found = read_tensors(locate_model(str(folder)), BF16, lambda weight: weight)
    assert found.keys() == expected.keys()
    for each, weight in expected.items():
        parts = [weight] if isinstance(weight, torch.Tensor) else [weight.codes, weight.scales]
        others = [found[each]] if isinstance(weight, torch.Tensor) else [found[each].codes, found[each].scales]
        assert all(map(torch.equal, parts, others)), each


def test_a_change_in_any_of_several_files_is_found(tiny_model: Path, tmp_path: Path) -> None:
    for each in tiny_model.iterdir():
        if each.is_file():
            (tmp_path / each.name).write_bytes(each.read_bytes())
    split(tmp_path, 7)
    files = locate_model(str(tmp_path))
    for number in range(7):
        path = tmp_path / f"model-{number}.safetensors"
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(OtherModelError, match=f"{path} is not the file that was expected"):
            read_tensors(files, BF16, lambda weight: weight)
        path.write_bytes(before)
    assert read_tensors(files, BF16, lambda weight: weight)


def test_files_are_hashed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hash waits for another one, which would never come from one thread."""
    together, digest = threading.Barrier(2, timeout=60), digests._digest

    def waiting(file: Path) -> str:
        if file.suffix == ".safetensors":
            together.wait()
        return digest(file)

    monkeypatch.setattr(digests, "_digest", waiting)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_text(name)
    assert len(digests.digests_of(tmp_path).model) == 3


def test_sources_run_at_the_same_time_and_give_all_of_their_items() -> None:
    together = threading.Barrier(2, timeout=60)

    def source(name: str, num_items: int) -> Iterator[str]:
        together.wait()
        yield from (f"{name}{number}" for number in range(num_items))

    sources = [source(name, num_items) for name, num_items in (("a", 3), ("b", 0), ("c", 1), ("d", 2))]
    assert sorted(interleaved(iter(sources), 2)) == ["a0", "a1", "a2", "c0", "d0", "d1"]


def test_a_source_that_fails_ends_all() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        list(interleaved(iter([failing(), (number for number in range(10**9))]), 2))
