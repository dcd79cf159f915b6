from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from swiftbatch.jobs.input.job_files import InputFileError
from tests.jobs.input.job_lines import GOOD, read_jobs
from tests.jobs.input.test_input_file import zstd

LINES = "".join(json.dumps(GOOD | {"custom_id": name, "prompt": "Füße 😀"}, ensure_ascii=False) + "\n" for name in "ab")
DATA = LINES.encode()
ARRAY = [json.loads(line) for line in LINES.splitlines()]


def archive(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in names:
            file.writestr(name, DATA)
    return made.getvalue()


def tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        member = tarfile.TarInfo("jobs.jsonl")
        member.size = len(DATA)
        file.addfile(member, io.BytesIO(DATA))
    return made.getvalue()


KINDS = {
    "UTF-16 as Windows has it": (LINES.encode("utf-16"), "found UTF-16 text; .* iconv -f UTF-16 -t UTF-8"),
    "UTF-16BE with a mark": (
        b"\xfe\xff" + LINES.encode("utf-16-be"),
        "found UTF-16 text; .* iconv -f UTF-16 -t UTF-8",
    ),
    "UTF-16LE": (LINES.encode("utf-16-le"), "found UTF-16 text; .* iconv -f UTF-16LE -t UTF-8"),
    "UTF-16BE": (LINES.encode("utf-16-be"), "found UTF-16 text; .* iconv -f UTF-16BE -t UTF-8"),
    "UTF-32": (LINES.encode("utf-32"), "found UTF-32 text; .* iconv -f UTF-32 -t UTF-8"),
    "UTF-32LE": (LINES.encode("utf-32-le"), "found UTF-32 text; .* iconv -f UTF-32LE -t UTF-8"),
    "UTF-32BE": (LINES.encode("utf-32-be"), "found UTF-32 text; .* iconv -f UTF-32BE -t UTF-8"),
    "UTF-16 in gzip": (gzip.compress(LINES.encode("utf-16")), "found UTF-16 text; expected UTF-8"),
    "gzip twice": (
        gzip.compress(gzip.compress(DATA)),
        "found gzip data in its gzip data; .*: unpack it once, with gunzip",
    ),
    "zstd twice": (zstd(zstd(DATA)), "found zstd data in its zstd data; .*: unpack it once, with zstd -d"),
    "gzip in zstd": (zstd(gzip.compress(DATA)), "found gzip data in its zstd data; .*: unpack it once, with zstd -d"),
    "bzip2 in gzip": (gzip.compress(bz2.compress(DATA)), "found bzip2 data; .* bunzip2"),
    "bzip2": (bz2.compress(DATA), "found bzip2 data; .* in gzip or zstd: unpack it with bunzip2"),
    "xz": (lzma.compress(DATA), "found xz data; .* unpack it with unxz"),
    "tar": (tar(), "found a tar archive; .* unpack it with tar -x"),
    "tar.gz": (gzip.compress(tar()), "found a tar archive; .* unpack it with tar -x"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "found a PDF document; expected a JSONL or Parquet file"),
    "ZIP": (archive("jobs.jsonl"), "found a ZIP archive; .* unpack it with unzip"),
    "xlsx": (
        archive("[Content_Types].xml", "xl/workbook.xml"),
        "found an office document, such as .xlsx; expected a JSONL or Parquet file",
    ),
    "xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "found an office document; expected a JSONL or"),
    "a JSON array": (json.dumps(ARRAY).encode(), "found a JSON array; expected one JSON object a line, .* jq -c"),
    "an array over lines": (json.dumps(ARRAY, indent=2).encode(), "found a JSON array; expected one JSON object"),
    "an array of lines": (b"[" + b",\n".join(DATA.splitlines()) + b"]\n", "found a JSON array; expected one JSON"),
    "an array with a mark": (b"\xef\xbb\xbf\n " + json.dumps(ARRAY).encode(), "found a JSON array; expected one JSON"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_before_any_line_is_read(tmp_path: Path, kind: str) -> None:
    data, reason = KINDS[kind]
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputFileError, match=rf"^cannot read the job file {path}: {reason}[^\n]*$"):
        read_jobs(str(path), 1)


def test_one_that_comes_through_a_pipe_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(LINES.encode("utf-16"),))
    writer.start()
    with pytest.raises(InputFileError, match="found UTF-16 text"):
        read_jobs(str(path), 1)
    writer.join()


@pytest.mark.parametrize(
    "first",
    ["[1, 2]", "[]", json.dumps(ARRAY), "[{torn", "[" + "x" * 40, "%PDF", "PK", "BZh9", "ustar", "\0\0", "a\0"],
    ids=range(11),
)
def test_a_first_line_that_only_looks_like_another_kind_is_a_bad_line(tmp_path: Path, first: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(f"{first}\n{LINES}")
    jobs, rejects = read_jobs(str(path), 1)
    assert [number for number, _ in jobs] == [2, 3]
    assert [reject.line_number for reject in rejects] == [1]
