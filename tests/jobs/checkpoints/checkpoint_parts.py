"""A sequence whose tokens and KV follow from their positions."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart, SegmentEntry, StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kv_segments import Segment
from swiftbatch.jobs.checkpoints.token_log import WORKER_LOG_SUFFIX, WORKER_LOGS_FOLDER, TokenIds, unpack
from swiftbatch.jobs.file_owner import Identity

JOB = "job-0123456789abcdef"
FINGERPRINT = "fp_0123456789abcdef"
IDENTITY = Identity(job_id=JOB, fingerprint=FINGERPRINT)
NUM_PROMPT_TOKENS = 4
KV_SHAPE = (6, 4)  # rows and head dimension


def claim(checkpoints: CheckpointStore, job_id: str, worker_id: str, numerics: str = "") -> int:
    attempt = max(checkpoints.attempts(job_id), default=0) + 1
    start = AttemptStart(worker_id=worker_id, claimed=time.time(), numerics=numerics, attempt=attempt)
    checkpoints.begin(job_id, attempt, start)
    return attempt


def logged_jobs(run: Path) -> set[str]:
    """Return the jobs with a token log, packed or not."""
    own = {path.parent.parent.name for path in run.glob("checkpoints/*/*/tokens.bin")}
    for path in run.glob(f"{WORKER_LOGS_FOLDER}/*{WORKER_LOG_SUFFIX}"):
        with suppress(FileNotFoundError):  # it was replaced meanwhile
            own |= {entry.job_id for entry in unpack(path.read_bytes())[0]}
    return own


def tokens_at(start: int, end: int) -> TokenIds:
    """Return the tokens [num_positions], prompt included."""
    return (np.arange(start, end, dtype=np.uint32) * 2654435761 % 50_000).astype(np.uint32)


def output_ids(num_tokens: int) -> TokenIds:
    return tokens_at(NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS + num_tokens)


def kv_at(start: int, end: int) -> NDArray[Any]:
    """Return KV [num_rows, num_positions, head_dim]."""
    num_rows, head_dim = KV_SHAPE
    rows, columns = np.arange(num_rows)[:, None, None], np.arange(head_dim)
    return ((rows * 7919 + np.arange(start, end)[:, None] * 31 + columns) % 65_521).astype(np.uint16)


class Cache:
    def kv(self, start: int, end: int) -> NDArray[Any]:
        return kv_at(start, end)


def segment_of(start: int, end: int) -> Segment:
    return Segment(start, tokens_at(start, end), kv_at(start, end))


def write_state(
    checkpoints: CheckpointStore,
    attempt: int,
    ends: list[int],
    older: tuple[SegmentEntry, ...] = (),
    job_id: str = JOB,
    replaced: Collection[str] = (),
) -> StateManifest:
    """Write segments up to each of `ends`, a drafter state at the last, and their manifest."""
    segments = list(older)
    for end in ends:
        start = segments[-1].end if segments else 0
        segments.append(checkpoints.write_segment(job_id, attempt, segment_of(start, end)))
    drafter = checkpoints.write_drafter(job_id, attempt, ends[-1], "suffix", {"table": np.arange(ends[-1])})
    manifest = StateManifest(segments=tuple(segments), drafter=drafter)
    checkpoints.write_manifest(job_id, attempt, manifest, replaced)
    return manifest


def check_checkpoints(checkpoints: CheckpointStore) -> tuple[int, int]:
    """Check everything readable; return the numbers of tokens and positions found."""
    found = checkpoints.read_log(JOB).token_ids
    assert found.tolist() == output_ids(len(found)).tolist()
    most = 0
    for manifest in checkpoints.read_manifests(JOB):
        for entry in manifest.segments:
            segment = checkpoints.read_segment(JOB, entry)
            if segment is None:
                break
            assert (segment.start, segment.end) == (entry.start, entry.end)
            assert segment.token_ids.tolist() == tokens_at(entry.start, entry.end).tolist()
            assert np.array_equal(segment.kv, kv_at(entry.start, entry.end))
            most = max(most, entry.end)
        if manifest.drafter is not None:
            state = checkpoints.read_drafter(JOB, manifest.drafter)
            assert state is None or np.array_equal(state["table"], np.arange(manifest.drafter.num_positions))
    return len(found), most
