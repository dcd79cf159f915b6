from __future__ import annotations

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.jobs.input.job_files import InputFileError
from swiftbatch.jobs.input.reader import MAX_LINE_BYTES, JobReader, job_lines
from tests import ROOT
from tests.jobs.input.job_lines import CHAT, GOOD, read_jobs

TEXT = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\n{broken\n" + json.dumps(CHAT).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


COMPRESSED = [gzip.compress, zstd]


def summary(path: str) -> list[tuple[int, str | None]]:
    """Return the line numbers of jobs, by `custom_id`, and of rejects."""
    jobs, rejects = read_jobs(path, 1)
    return sorted(
        [(number, job.custom_id) for number, job in jobs] + [(reject.line_number, None) for reject in rejects]
    )


EXPECTED = [(1, "good"), (3, None), (4, "talk")]


@pytest.mark.parametrize("compress", COMPRESSED)
def test_a_compressed_file_is_read_as_what_it_holds_whatever_its_name(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(compress(TEXT))
    assert summary(str(path)) == EXPECTED
    path.write_bytes(compress(TEXT[:50]) + compress(TEXT[50:]))  # as `cat` of two files
    assert summary(str(path)) == EXPECTED


def test_a_compressed_file_behind_a_uri_is_read_and_a_damaged_one_is_named_by_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl.gz"
    path.write_bytes(gzip.compress(TEXT))
    reader = JobReader(1)
    assert [number for number, _ in job_lines([path.as_uri()], reader)] == [1, 4]
    assert [reject.line_number for reject in reader.rejects] == [3]
    path.write_bytes(gzip.compress(TEXT)[:-1])
    with pytest.raises(InputFileError, match=f"^cannot read the job file {path.as_uri()}: its gzip data is damaged"):
        list(job_lines([path.as_uri()], JobReader(1)))


@pytest.mark.parametrize("compress", [bytes, *COMPRESSED])
def test_standard_input_and_a_named_pipe_are_read(
    tmp_path: Path, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = compress(TEXT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert summary("-") == EXPECTED
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(data), daemon=True)
    writer.start()
    assert summary(str(pipe)) == EXPECTED
    writer.join()


def test_what_a_shell_puts_in_place_of_a_file_is_read() -> None:
    program = "import sys; from tests.jobs.input.job_lines import read_jobs; print(len(read_jobs(sys.argv[1], 1)[0]))"
    script = f'"{sys.executable}" -c "$0" - < "$1" && "{sys.executable}" -c "$0" <(cat "$1")'
    demo = str(ROOT / "k8s/overlays/cpu-demo/demo-jobs/jobs.jsonl")
    done = subprocess.run(
        ["bash", "-c", script, program, demo], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    num_jobs = len(read_jobs(demo, 1)[0])
    assert done.stdout.split() == [str(num_jobs)] * 2


@pytest.mark.parametrize("compress", COMPRESSED)
@settings(max_examples=100)
@given(data=st.data())
def test_compressed_data_that_is_cut_off_or_damaged_is_refused_in_one_line_or_read_as_it_was(
    tmp_path: Path, compress: Callable[[bytes], bytes], data: st.DataObject
) -> None:
    path, whole = tmp_path / "jobs.jsonl", compress(TEXT)
    end = data.draw(st.integers(5, len(whole) - 1))
    path.write_bytes(whole[:end])
    with pytest.raises(InputFileError, match=r"^cannot read the job file .* data is damaged or cut off: [^\n]*$"):
        read_jobs(str(path), 1)
    position = data.draw(st.integers(4, len(whole) - 1))
    path.write_bytes(
        whole[:position] + bytes([whole[position] ^ data.draw(st.integers(1, 255))]) + whole[position + 1 :]
    )
    with suppress(InputFileError):
        read_jobs(str(path), 1)


def test_a_huge_line_in_a_small_file_is_a_reject_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(bytes(2**20))
        file.write(b"\n" + json.dumps(GOOD).encode())
    tracemalloc.start()
    try:
        assert summary(str(path)) == [(1, None), (2, "good")]
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()


def test_a_folder_a_socket_and_a_device_are_refused_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        kinds = {"socket": "found a socket", "/dev/zero": "found a device", str(tmp_path): "Is a directory"}
        for path, problem in kinds.items():
            with pytest.raises(InputFileError) as caught:
                read_jobs(path, 1)
            assert str(caught.value) == f"cannot read the job file {path}: {problem}; expected a JSONL or Parquet file"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(InputFileError, match=r"^standard input holds no jobs"):
        read_jobs("-", 1)
