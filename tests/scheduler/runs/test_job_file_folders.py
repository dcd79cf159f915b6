from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest

from swiftbatch.jobs.input.reader import digest_of
from swiftbatch.jobs.storage.store import Store


def test_a_files_digest_needs_no_room_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    data = b"Once" * 1_000_000
    (tmp_path / "a.jsonl").write_bytes(data)

    assert digest_of(Store(str(tmp_path)), "a.jsonl") == hashlib.sha256(data).hexdigest()
