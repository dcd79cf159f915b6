"""A `Store` on every kind of storage has plain names only, and errors in one clear line."""

from __future__ import annotations

import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.storage.store import Store, StoreError


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind: a folder on the disk, and one on an S3 server."""
    return Store(str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_uri"))


class TestEveryKindOfStore:
    def test_what_is_written_is_read_and_replaced_as_a_whole(self, store: Store) -> None:
        store.write("results/a.json", b"first, and longer")
        store.write("results/a.json", b"second")
        assert store.read("results/a.json") == b"second"
        store.write("empty", b"")
        assert store.read("empty") == b""

    def test_what_is_absent_is_none_or_empty(self, store: Store) -> None:
        assert store.read("results/a.json") is None
        assert not store.exists("results/a.json")
        assert store.list("results") == []
        assert store.list("") == []

    def test_list_gives_sorted_names_of_files_and_folders(self, store: Store) -> None:
        for path in ("b", "a", "folder/one", "folder/inner/two"):
            store.write(path, b"x")
        assert store.list("") == ["a", "b", "folder"]
        assert store.list("folder") == ["inner", "one"]

    def test_a_folder_is_no_file(self, store: Store) -> None:
        store.write("folder/one", b"x")
        assert store.exists("folder/one")
        assert not store.exists("folder")

    def test_write_new_leaves_an_existing_file_alone(self, store: Store) -> None:
        assert store.write_new("results/a", b"first")
        assert not store.write_new("results/a", b"second")
        assert store.read("results/a") == b"first"

    def test_write_from_takes_the_rest_of_a_file(self, store: Store) -> None:
        source = BytesIO(b"head" + b"x" * 20_000_000)
        source.seek(4)
        store.write_from("long", source)
        assert store.read("long") == b"x" * 20_000_000

    def test_a_big_file_is_written_from_a_view_of_memory(self, store: Store) -> None:
        data = os.urandom(45_000_000)
        store.write("segment", memoryview(data))
        assert store.read("segment") == data

    def test_a_file_is_written_whatever_its_length(self, store: Store) -> None:
        for size in (5 * 2**20 - 1, 5 * 2**20, 10 * 2**20, 20 * 2**20, 20 * 2**20 + 1):
            store.write("file", bytes(size))
            assert len(store.read("file") or b"") == size

    def test_write_from_takes_the_rest_of_a_file_on_the_disk(self, store: Store) -> None:
        with TemporaryFile() as source:
            source.write(b"head" + b"x" * 7_000_000)
            source.seek(4)
            store.write_from("long", source)
            store.write_from("nothing", source)
        assert store.read("long") == b"x" * 7_000_000
        assert store.read("nothing") == b""

    def test_copy_to_gives_the_bytes_of_a_file_in_pieces(self, store: Store) -> None:
        class Target(BytesIO):
            sizes: ClassVar[list[int]] = []

            def write(self, data: Any, /) -> int:
                self.sizes.append(len(data))
                return super().write(data)

        data = os.urandom(20_000_000)
        store.write("long", data)
        store.write("empty", b"")
        target = Target()
        assert store.copy_to("long", target)
        assert target.getvalue() == data
        assert max(target.sizes) <= 2**23
        assert store.copy_to("empty", target)
        assert not store.copy_to("absent", target)
        assert len(target.getvalue()) == 20_000_000

    @pytest.mark.parametrize("part", [range(0), range(150, 151), range(7, 200), range(199, 300)])
    def test_pieces_of_a_part_are_its_bytes(self, store: Store, part: range) -> None:
        store.write("file", bytes(range(200)))
        assert b"".join(store.pieces("file", part.start, len(part)) or ()) == bytes(range(200))[part.start : part.stop]

    def test_an_error_of_the_target_of_a_copy_stays_what_it_is(self, store: Store) -> None:
        class Closed(BytesIO):
            def write(self, data: Any, /) -> int:
                raise BrokenPipeError(32, "Broken pipe")

        store.write("a", b"x")
        with pytest.raises(BrokenPipeError):
            store.copy_to("a", Closed())

    def test_delete_takes_one_file_and_an_absent_one_is_fine(self, store: Store) -> None:
        store.write("folder/one", b"x")
        store.write("folder/two", b"x")
        store.delete("folder/one")
        store.delete("folder/one")
        assert store.list("folder") == ["two"]

    def test_delete_folder_takes_all_in_it_and_nothing_else(self, store: Store) -> None:
        for path in ("folder/one", "folder/inner/two", "folder2/one"):
            store.write(path, b"x")
        store.delete_folder("folder")
        store.delete_folder("folder")
        assert store.list("folder") == []
        assert store.read("folder/inner/two") is None
        assert store.list("folder2") == ["one"]

    @pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", "a//b", "a/", ".", "./a", ".hidden", "a\0b"])
    def test_a_path_that_is_no_plain_name_is_refused_by_every_method(self, store: Store, path: str) -> None:
        calls = [store.read, store.exists, store.delete, store.delete_folder, *([store.list] if path else [])]
        for call in calls:
            with pytest.raises(StoreError, match="refused the path"):
                call(path)
        with pytest.raises(StoreError, match="refused the path"):
            store.copy_to(path, BytesIO())
        for write in (store.write, store.write_new):
            with pytest.raises(StoreError, match="refused the path"):
                write(path, b"x")


@given(path=st.text(st.sampled_from("a./\0\\"), max_size=8))
def test_no_path_leads_out_of_the_folder(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    folder = tmp_path_factory.mktemp("outside")
    store = Store(str(folder / "run"))
    with suppress(StoreError):
        store.write(path, b"x")
    assert set(os.listdir(folder)) <= {"run"}


def test_an_unwritable_folder_gives_one_line_that_names_it_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (str(tmp_path / "file" / "run"), "/proc/swiftbatch-run"):
        with pytest.raises(StoreError) as caught:
            Store(folder).write("run.json", b"x")
        assert folder in str(caught.value)
        assert "'run.json'" in str(caught.value)
        assert "use another one" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_relative_path_stays_right_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("run")
    monkeypatch.chdir("/")
    store.write("a", b"x")
    assert store.uri == str(tmp_path / "run")
    assert (tmp_path / "run" / "a").exists()


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    Store(f"file://{tmp_path}/my%20run").write("a", b"x")
    assert Store(str(tmp_path / "my run")).read("a") == b"x"


@pytest.mark.parametrize("uri", ["", "ftp://host/run", "file://run", "a\0b", "s3://", "gs:///run"])
def test_a_uri_of_another_kind_is_refused_with_what_is_expected(uri: str) -> None:
    with pytest.raises(StoreError, match=r"cannot use .* as a folder: expected"):
        Store(uri)


def test_a_store_says_whether_it_is_local(tmp_path: Path, s3_uri: str) -> None:
    assert Store(str(tmp_path)).is_local
    assert not Store(s3_uri).is_local
