"""Runs a job's commits in a child that is killed before its k-th filesystem operation, for k = 1, 1 + N, ...

`python commit_steps.py FOLDER N` leaves each child's run in `FOLDER/<k>` and its completed flushes in
`<k>.acknowledged`.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart, ResumeRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.token_log import PackedLogs, WorkerLogs
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import (
    FINGERPRINT,
    JOB,
    NUM_PROMPT_TOKENS,
    Cache,
    check_checkpoints,
    output_ids,
    tokens_at,
)
from tests.jobs.run.run_parts import FINISHED, MANIFEST

NUM_POSITIONS = 48  # of the finished sequence
CHANGING = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate"}


class Killer:
    """Counts filesystem operations and kills the process before or amid number `last`."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._num_steps = 0

    def start(self) -> None:
        """Audit events include all file operations but `fsync`."""
        os.fsync = self.fsync
        sys.addaudithook(self._audit)

    def fsync(self, descriptor: int) -> None:
        """Write a part or all of the data; no real fsync, because a killed process's writes stay."""
        status = os.fstat(descriptor)
        for size in (status.st_size // 2, status.st_size):
            if self._is_last_step():
                if stat.S_ISREG(status.st_mode):
                    os.ftruncate(descriptor, size)
                os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if (event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))) and self._is_last_step():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_last_step(self) -> bool:
        self._num_steps += 1
        return self._num_steps == self._last


def run_attempt(store: Store, num_positions: int, acknowledged: int | None = None) -> None:
    checkpoints, packed = CheckpointStore(store, FINGERPRINT), PackedLogs(store, FINGERPRINT)
    packed.put_in_place(packed.found())
    attempt = max(checkpoints.attempts(JOB), default=0) + 1
    start = AttemptStart(worker_id="w1", claimed=3e9, numerics="cpu", attempt=attempt)
    num_tokens, num_loaded = check_checkpoints(checkpoints)
    manifests = checkpoints.read_manifests(JOB)
    segments = manifests[0].segments if manifests else ()
    if attempt > 1:
        record = ResumeRecord(
            kind="kv" if segments else "replay",
            num_recovered_tokens=num_tokens,
            num_recomputed_tokens=0,
            num_loaded_positions=num_loaded,
            seconds=0.1,
            resumed=3e9,
        )
        checkpoints.begin(JOB, attempt, start)
        checkpoints.write_resume(JOB, attempt, record)
    writer = CheckpointWriter(checkpoints, 16, lambda *_: None, WorkerLogs(packed, "w1"))
    writer.open(JOB, attempt, "suffix", Cache(), segments, start=start, is_begun=attempt > 1)
    for end in (max(num_loaded, num_positions - 10), num_positions):
        writer.put_tokens(JOB, output_ids(end - NUM_PROMPT_TOKENS))
        writer.put_state(JOB, tokens_at(0, end), {"table": np.arange(end)})
        assert writer.flush(60)
        if acknowledged is not None:
            os.write(acknowledged, f"{end - NUM_PROMPT_TOKENS} {end}\n".encode())
    writer.close(JOB)
    writer.stop()


def result() -> dict[str, Any]:
    body = FINISHED["response"]["body"]
    choice = {"text": output_ids(NUM_POSITIONS - NUM_PROMPT_TOKENS).tobytes().hex(), "finish_reason": "length"}
    return FINISHED | {"response": {"body": body | {"choices": [choice]}}}


def finish(store: Store) -> None:
    Run(store, MANIFEST).write_segment(f"w{os.getpid()}", ResultSegment([(JOB, result())]))
    CheckpointStore(store, FINGERPRINT).clear(JOB)
    packed = PackedLogs(store, FINGERPRINT)
    packed.put_in_place(packed.found().without([JOB]))


def run_child(folder: Path, last: int) -> NoReturn:
    signal.alarm(60)  # a hanging child must not outlive the test
    acknowledged = os.open(f"{folder}.acknowledged", os.O_WRONLY | os.O_CREAT)
    Killer(last).start()
    store = Store(str(folder))
    run_attempt(store, 20, acknowledged)
    run_attempt(store, NUM_POSITIONS, acknowledged)
    finish(store)
    os._exit(0)


def main(folder: Path, stride: int) -> None:
    for last in count(1, stride):
        child = os.fork()
        if child == 0:
            try:
                run_child(folder / f"{last}", last)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            print(last - stride)
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
