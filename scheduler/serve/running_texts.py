"""The texts of a batch's running jobs so far, from their token logs."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.packed_logs import PackedLogs
from swiftbatch.jobs.run.job_index import JobName, job_names
from swiftbatch.jobs.run.job_table import paths
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    from swiftbatch.worker.model.tokenizer import TextCodec

NUM_KNOWN_RUNS = 8  # runs whose names stay in memory: pages and clients ask again and again


def partial_texts(run: Run, running: Container[str], last_tokens: int | None = None) -> list[dict[str, Any]]:
    """The texts of the jobs that are named, each with its line, choice, number of tokens, and text or the end of it.

    Raises ModelError if the run's tokenizer is not there, RunError, StoreError.
    """
    checkpoints, packed = CheckpointStore.of(run), PackedLogs.of(run).read()
    texts = []
    for job in names_of(run.store):
        if job.name in running:
            kept = packed[job.job_id].log if job.job_id in packed else checkpoints.read_log(job.job_id)
            token_ids = kept.token_ids.tolist()
            settled = _codec(run.manifest.stored_model).output_text.settled
            num_before = 0 if last_tokens is None else len(settled(token_ids[:-last_tokens]))
            texts.append(
                {
                    "custom_id": job.custom_id,
                    "index": job.choice_index,
                    "num_tokens": len(token_ids),
                    "text": settled(token_ids)[num_before:],
                }
            )
    return texts


def names_of(store: Store) -> tuple[JobName, ...]:
    """The jobs of a run whose lines are all in it. Raises RunError, StoreError."""
    return _names(store.uri, tuple(paths(store)))


@functools.lru_cache(maxsize=NUM_KNOWN_RUNS)
def _names(uri: str, _tables: tuple[str, ...]) -> tuple[JobName, ...]:
    return tuple(job_names(Store(uri)))


@functools.lru_cache(maxsize=2)
def _codec(model: str) -> TextCodec:
    from swiftbatch.worker.model.model_files import locate_model
    from swiftbatch.worker.model.tokenizer import TextCodec

    return TextCodec(locate_model(model))
