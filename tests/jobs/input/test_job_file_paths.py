from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.job_files import InputFileError, found_files, run_folder_beside
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.parquet_rows import ColumnError, Columns
from swiftbatch.jobs.input.reader import JobReader, job_lines
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.storage.store import Store
from tests.jobs.input.job_lines import GOOD


def write(path: Path, *names: str, **fields: Any) -> bytes:
    lines = [json.dumps(GOOD | {"custom_id": name} | fields) if name != "bad" else "{bad" for name in names]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path.read_bytes()


@dataclass
class FoundLines:
    reader: JobReader
    jobs: list[tuple[int, JobLine]]

    @property
    def rejects(self) -> list[Reject]:
        return list(self.reader.rejects)

    def placed(self, reject: Reject) -> Reject:
        return self.reader.placed(reject)


def read(*said: str, columns: tuple[str, ...] = ()) -> FoundLines:
    reader = JobReader(1, Columns.parse(columns))
    return FoundLines(reader, list(job_lines(said, reader)))


def names(found: FoundLines) -> list[str]:
    return [line.custom_id for _, line in found.jobs]


def refused(*said: str) -> str:
    with pytest.raises(UserError) as caught:
        read(*said)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b.jsonl", "b1", "bad", "b2")
    write(tmp_path / "a.jsonl", "a1", "b1")
    write(tmp_path / "c.jsonl", "c1", "bad", "a1")
    return tmp_path


def test_files_are_read_in_order_and_places_name_them(folder: Path) -> None:
    found = read("b.jsonl", "[ac].jsonl")
    assert names(found) == ["b1", "b2", "a1", "c1"]
    assert [number for number, _ in found.jobs] == [1, 3, 4, 6]
    rejects = [found.placed(reject) for reject in found.rejects]
    assert [reject.place for reject in rejects] == ["b.jsonl:2", "a.jsonl:2", "c.jsonl:2", "c.jsonl:3"]
    assert 'found "b1" again (first in b.jsonl:1)' in rejects[1].reason
    assert 'found "a1" again (first in a.jsonl:1)' in rejects[3].reason
    alone = read("b.jsonl")
    assert [alone.placed(reject).place for reject in alone.rejects] == ["line 2"]


def test_a_pattern_s_files_are_sorted_each_is_read_once_and_a_name_that_looks_like_one_is_a_name(folder: Path) -> None:
    assert found_files(["b.jsonl", "*.jsonl", str(folder / "a.jsonl")]) == ["b.jsonl", "a.jsonl", "c.jsonl"]
    (folder / "below").mkdir()
    write(folder / "below" / "d.jsonl", "d")
    (folder / "link.jsonl").symlink_to("a.jsonl")
    assert found_files(["link.jsonl", "[a]*", (folder / "a.jsonl").as_uri()]) == ["link.jsonl"]  # by any of its names
    (folder / "link.jsonl").unlink()
    assert found_files(["**/d.jsonl", "b*"]) == ["below/d.jsonl", "b.jsonl"]  # a folder is no file
    write(folder / "[a].jsonl", "odd")
    assert names(read("[a].jsonl")) == ["odd"]
    uri = f"{folder.as_uri()}/*.jsonl"
    assert names(read(uri)) == ["odd", "a1", "b1", "b2", "c1"]


def test_a_pattern_without_files_and_an_absent_file_are_refused_in_one_line(folder: Path) -> None:
    assert refused("a.jsonl", "none-*.jsonl").startswith("no file matches none-*.jsonl: expected")
    assert refused(f"{folder.as_uri()}/x*").startswith(f"no file matches {folder.as_uri()}/x*")
    assert "none.jsonl: No such file" in refused("a.jsonl", "none.jsonl")
    assert refused("").startswith("cannot read the job file '': No such file")
    assert "three slashes" in refused("file://host/a.jsonl")
    for place, absent in (
        ("s3://", "bucket"),
        ("s3:///a.jsonl", "bucket"),
        ("s3://bucket", "file"),
        ("gs://b/", "file"),
    ):
        said = f"{place}: found no {absent}, expected both, as in {place[:2]}://bucket/jobs.jsonl"
        assert refused(place) == f"cannot read the job file {said}"


def test_an_empty_file_among_others_is_fine_and_empty_files_alone_are_not(folder: Path) -> None:
    (folder / "empty-1.jsonl").touch()
    (folder / "empty-2.jsonl").touch()
    found = read("empty-1.jsonl", "a.jsonl", "empty-2.jsonl", "c.jsonl")
    assert [found.placed(reject).place for reject in found.rejects] == ["c.jsonl:2", "c.jsonl:3"]
    assert refused("empty-*.jsonl").startswith("empty-1.jsonl and 1 more file hold no jobs")


@settings(max_examples=50)
@given(files=st.lists(st.lists(st.sampled_from(["bad", "", "a", "b", "c"]), max_size=5), min_size=2, max_size=4))
def test_however_lines_are_shared_out_over_files_they_are_the_jobs_of_one_file(
    tmp_path: Path, files: list[list[str]]
) -> None:
    texts = [[json.dumps(GOOD | {"custom_id": name}) if len(name) == 1 else name for name in file] for file in files]
    paths = [tmp_path / f"part-{number}.jsonl" for number in range(len(files))]
    for path, lines in zip(paths, texts, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "whole.jsonl").write_text("".join(path.read_text() for path in paths))
    if not any(map(any, files)):
        return
    parts, whole = read(*map(str, paths)), read(str(tmp_path / "whole.jsonl"))
    assert [line for _, line in parts.jobs] == [line for _, line in whole.jobs]
    assert [reject.custom_id for reject in parts.rejects] == [reject.custom_id for reject in whole.rejects]
    for reject in map(parts.placed, parts.rejects):
        number = next(number for number, path in enumerate(paths) if str(path) == reject.file)
        assert files[number][reject.line_number - 1]


def test_columns_give_lines_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    lines = [
        {"id": 1, "text": "Once", "limit": 5, "label": "x", "prompt": "not this"},
        {"id": "two", "text": "Twice", "max_tokens": 7},
        {"id": "three", "prompt": "not this"},
        {"text": "Once"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(str(path), columns=("prompt=text", "custom_id=id", "max_tokens=limit"))
    assert [(line.custom_id, line.prompts, line.max_tokens) for _, line in found.jobs] == [
        ("1", ("Once",), 5),
        ("two", ("Twice",), None),
    ]
    assert found.jobs[0][1].without_effect == ("label", "prompt")
    assert [reject.reason for reject in found.rejects] == [
        'field "text": found nothing, expected the prompt as --column says',
        'field "id": found nothing, expected the custom_id as --column says',
    ]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (["prompt"], 'found "prompt", expected FIELD=COLUMN'),
        (["prompt="], 'found "prompt=", expected FIELD=COLUMN'),
        (["promt=text"], 'unknown field "promt", expected one of: custom_id, prompt, messages'),
        (["prompt=a", "prompt=b"], 'found two columns for the field "prompt"'),
    ],
)
def test_columns_that_make_no_sense_are_refused(said: list[str], problem: str) -> None:
    with pytest.raises(ColumnError) as caught:
        Columns.parse(said)
    assert problem in str(caught.value)


def test_files_and_patterns_in_an_object_store_are_read(folder: Path, s3_store: Store) -> None:
    for name in ("a", "b", "c"):
        s3_store.write(f"in/{name}.jsonl", (folder / f"{name}.jsonl").read_bytes())
    parquet.write_table(pa.table({"prompt": ["Once"]}), folder / "d.parquet")
    s3_store.write("in/d.parquet", (folder / "d.parquet").read_bytes())
    place = f"{s3_store.uri}/in"
    found = read("b.jsonl", f"{place}/[cd].*", f"{place}/a.jsonl")
    assert names(found) == ["b1", "b2", "c1", "a1", "d.parquet:1"]
    assert found.placed(found.rejects[1]).place == f"{place}/c.jsonl:2"
    assert refused(f"{place}/x*.jsonl").startswith(f"no file matches {place}/x*.jsonl")
    assert "found none there" in refused(f"{place}/x.jsonl")
    assert "expected '*' behind the last '/' alone" in refused(f"{s3_store.uri}/*/a.jsonl")


class Hub(MemoryFileSystem):
    """A stand-in for the hub with `hf://` files."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setitem(_registry, "hf", Hub)
    yield Hub()
    Hub.store.clear()


def test_a_copy_that_has_no_room_is_refused_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.pipe("/datasets/org/name/x.jsonl", b"{}")
    monkeypatch.setattr("swiftbatch.jobs.input.job_files.copy_foreign", full)
    line = refused("hf://datasets/org/name/x.jsonl")
    assert line.endswith("x.jsonl to a temporary file: No space left on device; make room there")


def test_data_sets_on_a_hub_are_read(folder: Path, hub: Hub) -> None:
    for number in range(2):
        parquet.write_table(pa.table({"text": [f"Once {number}"], "label": [0]}), folder / "x")
        hub.pipe(f"/datasets/org/name/data/train-{number}.parquet", (folder / "x").read_bytes())
    place = "hf://datasets/org/name/data"
    one = read(f"{place}/train-1.parquet", columns=("prompt=text",))
    assert [line.prompts for _, line in one.jobs] == [("Once 1",)]
    both = read(f"{place}/train-*.parquet", columns=("prompt=text",))
    assert names(both) == ["train-0.parquet:1", "train-1.parquet:1"]
    assert "found none there" in refused(f"{place}/absent.parquet")
    assert refused(f"{place}/absent-*.parquet").startswith(f"no file matches {place}/absent-*")


def test_a_place_that_nobody_knows_or_reaches_is_refused_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot read warp://x/y: Protocol not known: warp; expected a path, file://, s3://" in refused("warp://x/y")

    def dark(*_: object) -> bool:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr(Hub, "isfile", dark)
    for place in ("hf://datasets/org/name/x.parquet", "hf://datasets/org/name/*.parquet"):
        assert refused(place).startswith(f"cannot read {place}: Name or service not known; expected")


def test_a_file_that_is_no_utf8_by_name_gives_ids_that_are(tmp_path: Path) -> None:
    path = tmp_path / "odd-\udcff.parquet"
    parquet.write_table(pa.table({"prompt": ["Once"]}), tmp_path / "x")
    (tmp_path / "x").rename(path)
    assert names(read(str(path))) == ["odd-\\udcff.parquet:1"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("jobs.jsonl", "jobs.run"),
        ("train.v2.jsonl.gz", "train.v2.jsonl.gz.run"),
        ("rows.parquet", "rows.parquet.run"),
        ("plain", "plain.run"),
        (".jsonl", ".jsonl.run"),
        ("a*[b].jsonl", "a*[b].run"),
    ],
)
def test_a_run_without_a_name_lies_beside_its_file(tmp_path: Path, name: str, folder: str) -> None:
    (tmp_path / name).touch()
    assert run_folder_beside([str(tmp_path / name)]) == str(tmp_path / folder)


@pytest.mark.parametrize("found", ["notes.txt", "run.json", "drivers"])
def test_a_folder_that_is_no_run_is_not_taken_unasked(tmp_path: Path, found: str) -> None:
    (tmp_path / "jobs.jsonl").touch()
    (tmp_path / "jobs.run").mkdir()
    (tmp_path / "jobs.run" / found).touch()
    if found == "notes.txt":
        with pytest.raises(InputFileError, match="is there and is no run: name another folder with --run"):
            run_folder_beside([str(tmp_path / "jobs.jsonl")])
    else:
        assert run_folder_beside([str(tmp_path / "jobs.jsonl")]) == str(tmp_path / "jobs.run")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path, kind: str) -> None:
    (tmp_path / "jobs.jsonl").touch()
    (tmp_path / "jobs.run").touch() if kind == "file" else (tmp_path / "jobs.run").symlink_to("nowhere")
    with pytest.raises(InputFileError, match=r"cannot use .*jobs\.run as .*; name another folder with --run"):
        run_folder_beside([str(tmp_path / "jobs.jsonl")])
