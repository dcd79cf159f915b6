from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.driving import wait_until

if TYPE_CHECKING:  # these take a third of a second, which test collection should not spend
    from openai import OpenAI
    from openai.types import Batch

DEADLINE_SECONDS = 240
OFTEN = ("--checkpoint-seconds", "0.2")  # so that a job of a few seconds has a checkpoint early
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass
class Server:
    """A running server and OpenAI's real client."""

    process: subprocess.Popen[str]
    url: str

    @property
    def client(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def upload(self, *lines: object, name: str = "jobs.jsonl") -> str:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        return self.upload_of(text.encode(), name)

    def upload_of(self, data: bytes, name: str = "jobs.jsonl") -> str:
        return self.client.files.create(file=(name, data), purpose="batch").id

    def create(self, *lines: object, window: str = "24h") -> str:
        return self.create_from(self.upload(*lines), window)

    def create_of(self, data: bytes) -> str:
        return self.create_from(self.upload_of(data))

    def create_from(self, input_file_id: str, window: str = "24h") -> str:
        return self.client.batches.create(
            input_file_id=input_file_id,
            endpoint="/v1/completions",
            completion_window=window,
        ).id

    def ended(self, batch_id: str) -> Batch:
        """Poll rarely, to leave the batch the machine."""
        client = self.client
        return wait_until(lambda: batch if (batch := client.batches.retrieve(batch_id)).status in OVER else None, 0.5)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(runs: Path | str, model: Path, *options: str) -> Iterator[Server]:
    # float32: layers this small are not row-exact in bf16
    command = [sys.executable, "-m", "scheduler", "serve", "--runs", str(runs), "--port", "0"]
    command += ["--model", str(model), "--dtype", "float32", "--threads", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("serving on http://"), line
        try:
            yield Server(process, line.split()[2].rstrip(","))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(DEADLINE_SECONDS)


def request(custom_id: str, max_tokens: int = 20, **fields: object) -> dict[str, object]:
    body = {"prompt": "the quick brown fox", "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def until_half_done(run: Path) -> dict[Path, bytes]:
    """Wait until one job has a checkpoint and another a result; return the results."""
    segments = "results/segments/*.seg"
    wait_until(lambda: logged_jobs(run) and next(run.glob(segments), None))
    return {path: path.read_bytes() for path in run.glob(segments)}


def bodies(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return everything except times."""
    assert len(lines) == len({line["custom_id"] for line in lines})
    found = {line["custom_id"]: line["response"]["body"] for line in lines}
    return {
        name: ([without_metrics(choice) for choice in body["choices"]], body["usage"]) for name, body in found.items()
    }


def without_metrics(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name != "metrics"}


def drivers_of(server: Server) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"batch_driver_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
