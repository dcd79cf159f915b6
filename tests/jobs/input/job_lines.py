from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swiftbatch.jobs.input.job_files import shown_input
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.reader import JobReader
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import Job

GOOD = {"custom_id": "good", "prompt": "Once", "max_tokens": 5}
CHAT = {"custom_id": "talk", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


OPEN_LIMIT = 1000
"""The `max_tokens` that `read` gives to jobs which leave them open."""


def read_jobs(path: str, run_seed: int) -> tuple[list[tuple[int, JobLine]], list[Reject]]:
    """Read one file's jobs with line numbers, and its rejects. Raises `InputFileError`."""
    reader = JobReader(run_seed)
    jobs = list(reader.lines(path, shown_input(path)))
    reader.end()
    return jobs, list(reader.rejects)


def read_lines(folder: Path, *lines: Any, run_seed: int = 1) -> tuple[list[JobLine], list[Reject]]:
    """Read lines: bytes as they are, other values as JSON."""
    path = folder / "jobs.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    jobs, rejects = read_jobs(str(path), run_seed)
    return [job for _, job in jobs], rejects


def read(folder: Path, *lines: Any, run_seed: int = 1) -> tuple[list[Job], list[Reject]]:
    found, rejects = read_lines(folder, *lines, run_seed=run_seed)
    limits = [[line.max_tokens or OPEN_LIMIT] * max(1, len(line.prompts)) for line in found]
    return [job for line, most in zip(found, limits, strict=True) for job in line.jobs(most)], rejects


def batch(body: dict[str, Any], url: str = "/v1/completions", **changes: Any) -> dict[str, Any]:
    return {"custom_id": "b", "method": "POST", "url": url, "body": body} | changes
