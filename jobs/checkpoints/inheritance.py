"""The checkpoint of a job that goes on from another job's tokens: that one's attempts, with all its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.checkpoints.files import AttemptRecord, ClaimFile, ResumeFile, TimelineFile, dump_file
from jobs.checkpoints.logprob_spans import encode_span, span_name
from jobs.checkpoints.token_log import TokenLog, encode_tokens
from jobs.logprobs import TokenLogprobs
from jobs.storage.store import Store

FOLDER = "checkpoints"


def inherit(
    store: Store,
    job_id: str,
    earlier_id: str,
    attempts: Sequence[AttemptRecord],
    log: TokenLog,
    logprobs: TokenLogprobs | None = None,
) -> None:
    """Write what `job_id` begins with: the state kept of `earlier_id`, if any, then its attempts and `log`.

    `logprobs` are of all tokens of the log, where the job asks for them. The next attempt goes on there as after a
    loss. Call it before the run knows the job; again does no harm.
    """
    _copy_state(store, job_id, earlier_id)
    for record in attempts:
        is_last = record is attempts[-1]
        folder = f"{FOLDER}/{job_id}/{record.attempt:04d}"
        claim = ClaimFile(worker_id=record.worker_id, claimed=record.claimed, numerics=record.numerics)
        store.write(f"{folder}/claim.json", dump_file(claim))
        if record.resume is not None:
            store.write(f"{folder}/resume.json", dump_file(ResumeFile(**record.resume.model_dump())))
        if record.timeline is not None:
            # it ended with all its tokens in the log
            timeline = record.timeline.model_dump() | ({"is_released": True} if is_last else {})
            store.write(f"{folder}/timeline.json", dump_file(TimelineFile(**timeline)))
        known = log if is_last else TokenLog(np.zeros(0, dtype=np.uint32))
        if is_last and logprobs is not None:
            store.write(f"{folder}/{span_name(0, *reversed(log.progress))}", encode_span(log.token_ids, logprobs))
        store.write(f"{folder}/tokens.bin", encode_tokens(*known))


def _copy_state(store: Store, job_id: str, earlier_id: str) -> None:
    """Keys, values and drafter states, and last of all what names them."""
    earlier = f"{FOLDER}/{earlier_id}"
    found = [f"{attempt}/{name}" for attempt in store.list(earlier) for name in store.list(f"{earlier}/{attempt}")]
    state = [path for path in found if path.endswith(".arrow")]
    for path in [*state, *(path for path in found if path.endswith("/manifest.json"))]:
        if (data := store.read(f"{earlier}/{path}")) is not None:
            store.write(f"{FOLDER}/{job_id}/{path}", data)
