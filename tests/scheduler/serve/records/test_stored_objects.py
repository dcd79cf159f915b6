from __future__ import annotations

import io
from pathlib import Path

import pytest

from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.serve.records.server_records import (
    FileRecord,
    RefusedError,
    is_batch_id,
    is_file_id,
    new_batch_id,
    new_file_id,
)
from swiftbatch.scheduler.serve.records.stored_objects import Catalogue, StoredFiles
from tests.scheduler.serve.batch_parts import Folder
from tests.work_counts import counted_calls

HOSTILE = ["", ".", "..", "../x", "/etc/passwd", "file-", "file-" + "g" * 24, "file-" + "a" * 25, "file-\n", "a\0b"]


def record(number: int, created: float, owner: str | None = None) -> FileRecord:
    return FileRecord(
        id=f"file-{number:024x}", created=created, filename="x", purpose="batch", num_bytes=1, owner=owner
    )


def test_ids_are_random_and_nothing_else_is_one() -> None:
    assert is_file_id(new_file_id())
    assert is_batch_id(new_batch_id())
    assert len({new_file_id() for _ in range(1000)}) == 1000
    assert not any(is_file_id(name) or is_batch_id(name) for name in HOSTILE)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_a_client_reaches_a_path(name: str, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "runs"))
    kept = folder.files.add(io.BytesIO(b"data"), name, "batch", None)
    assert folder.again().files.get(kept.id, None).filename == name
    assert {path.name for path in tmp_path.rglob("*")} == {"runs", "files", kept.id, "content", "file.json"}
    for get in (folder.files.get, folder.batches.get):
        with pytest.raises(RefusedError) as refused:
            get(name, None)
        assert refused.value.status == 404


def test_a_file_without_its_record_is_not_there_and_goes_away(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    kept, torn = (folder.files.add(io.BytesIO(b"data"), "x", "batch", None) for _ in range(2))
    (tmp_path / "files" / torn.id / "file.json").unlink()
    files = folder.again().files
    assert [file.id for file in files.page(None, None, 9)[0]] == [kept.id]
    assert not (tmp_path / "files" / torn.id).exists()
    files.delete(kept)
    assert list((tmp_path / "files").iterdir()) == []
    assert len(StoredFiles(Store(str(tmp_path)))) == 0


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pages_hold_everything_once_in_order_while_more_comes(order: str, limit: int) -> None:
    catalogue = Catalogue(record(number, created=1 + number // 3) for number in range(20))
    found: list[str] = []
    after, has_more = None, True
    while has_more:
        page, has_more = catalogue.page(None, after, limit, order)
        found += [each.id for each in page]
        after = page[-1].id
        catalogue.enter(record(len(catalogue), created=100.0 if order == "desc" else 0.0))  # behind what is read
    expected = [record(number, 0).id for number in range(20)]
    assert found == (expected if order == "asc" else expected[::-1])


def test_an_owner_sees_what_is_its_own(tmp_path: Path) -> None:
    catalogue = Catalogue(record(number, number, owner="ab"[number % 2]) for number in range(6))
    page, has_more = catalogue.page("a", None, 2, "asc")
    assert ([each.owner for each in page], has_more) == (["a", "a"], True)
    assert catalogue.find(record(1, 1).id, "a") is None
    with pytest.raises(RefusedError, match="expected the id of an object in this list"):
        catalogue.page("a", record(1, 1).id, 2, "asc")
    assert catalogue.page(None, None, 2, "asc") == ([], False)


def test_a_thousand_files_are_paged_at_once() -> None:
    num_calls = []
    for num_files in (2000, 10_000):
        catalogue = Catalogue(record(number, number) for number in range(num_files))
        after, has_more = None, True
        with counted_calls() as work:
            for _ in range(10):
                page, has_more = catalogue.page(None, after, 100, "desc")
                after = page[-1].id
        assert has_more
        num_calls.append(work.num_calls)
    few, many = num_calls
    assert many < 1.5 * few
