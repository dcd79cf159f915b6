"""What a worker exports, and of what the driver exports totals over all workers."""

from __future__ import annotations

import time

from metrics.counters import CHECKPOINT_KINDS, MAX_POSITIONS_COUNTED, EngineCounters
from metrics.metric import Metric, Summary

Engine = Metric[EngineCounters]

DECODING = (
    Engine("prompt_tokens_total", "counter", "Prompt tokens of jobs taken in.", lambda c: c.num_prompt_tokens),
    Engine(
        "prefill_tokens_total",
        "counter",
        "Tokens read through the target before a job goes on: prompts, and replayed outputs.",
        lambda c: c.num_prefill_tokens,
    ),
    Engine(
        "generation_tokens_total",
        "counter",
        "Tokens generated; those that a resume recovered are apart.",
        lambda c: c.num_generation_tokens,
    ),
    Engine("spec_decode_num_drafts_total", "counter", "Draft trees verified.", lambda c: c.num_drafts),
    Engine("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted.", lambda c: c.num_draft_tokens),
    Engine(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Drafted tokens accepted; the bonus token of each step is apart.",
        lambda c: c.num_accepted_tokens,
    ),
    Engine(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        f"Drafted tokens accepted, by their position in the draft from 0 to {MAX_POSITIONS_COUNTED - 1}.",
        lambda c: {str(position): count for position, count in enumerate(c.num_accepted_tokens_per_pos)},
        "position",
    ),
    Engine("kv_cache_tokens", "gauge", "Positions held in the full key-value caches.", lambda c: c.kv_cache_tokens),
    Engine(
        "step_seconds",
        "summary",
        "Time of the engine's steps, by phase.",
        lambda c: {phase: Summary(c.num_steps, seconds) for phase, seconds in c.step_seconds.items()},
        "phase",
    ),
)
CHECKPOINTS = (
    Engine(
        "resumes_total",
        "counter",
        "Attempts that went on from a checkpoint: the cache was loaded (kv), or the tokens were run again (replay).",
        lambda c: c.num_resumes,
        "kind",
        ("kv", "replay"),
    ),
    Engine("tokens_recovered_total", "counter", "Tokens that resumes read back.", lambda c: c.num_tokens_recovered),
    Engine(
        "tokens_recomputed_total",
        "counter",
        "Tokens that were in no checkpoint yet when their worker was lost.",
        lambda c: c.num_tokens_recomputed,
    ),
    Engine(
        "checkpoint_bytes_total",
        "counter",
        "Bytes written: token logs (tokens), caches and drafters' tables (state).",
        lambda c: c.checkpoint_bytes,
        "kind",
        CHECKPOINT_KINDS,
    ),
    Engine(
        "checkpoint_seconds",
        "histogram",
        "Time to write one file of a checkpoint, in the background.",
        lambda c: c.checkpoint_seconds,
        "kind",
        CHECKPOINT_KINDS,
    ),
    Engine(
        "checkpoint_age_seconds",
        "gauge",
        "Time since the worker last wrote to a checkpoint, or since its work began; absent while it has no job.",
        lambda c: None if c.last_checkpoint is None else max(0.0, time.time() - c.last_checkpoint),
    ),
    Engine(
        "checkpoint_interval_seconds",
        "gauge",
        "Time that should pass between two token logs of a job, as `--checkpoint-seconds` says.",
        lambda c: c.checkpoint_interval_seconds,
    ),
    Engine(
        "stale_attempt_rejections_total",
        "counter",
        "Results that were not written, since a newer attempt had the job.",
        lambda c: c.num_stale_attempt_rejections,
    ),
    Engine(
        "store_retries_total",
        "counter",
        "Reads and writes of the run folder that were tried again.",
        lambda c: c.num_store_retries,
    ),
)
JOBS = (
    Engine(
        "jobs_finished_total",
        "counter",
        "Jobs that ended, by reason: all tokens (length), an end token or stop string (stop).",
        lambda c: c.jobs_finished,
        "reason",
        ("length", "stop"),
    ),
    Engine("job_seconds", "histogram", "Time of a finished job's last attempt.", lambda c: c.job_seconds),
    Engine(
        "job_generation_tokens", "histogram", "Tokens generated for a finished job.", lambda c: c.job_generation_tokens
    ),
)
WORKER_METRICS = DECODING + CHECKPOINTS + JOBS
TOTALS = tuple(metric for metric in WORKER_METRICS if metric.kind != "gauge")
