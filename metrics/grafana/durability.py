"""The dashboard Durability: what would be lost now, and what was preempted, resumed and computed again."""

from __future__ import annotations

from swiftbatch.metrics.grafana.panel import DRIVER, RATE, WORKER, Board, Panel, Query, lines, stack, value


def _increase(name: str, label: str = "") -> str:
    """The query for the increase of a driver's counter in the time shown."""
    by = f" by ({label})" if label else ""
    return f"sum{by} (increase(swiftbatch_{name}{{{DRIVER}}}[$__range]))"


def _total(name: str, label: str) -> str:
    return f"sum by ({label}) (swiftbatch_{name}{{{DRIVER}}})"


NUMBERS = (
    value(
        "Oldest checkpoint",
        "Of the busy worker that has written none for longest: what a kill would cost now.",
        f"max(swiftbatch_checkpoint_age_seconds{{{WORKER}}})",
        "s",
    ),
    value("Preemptions", "In the time shown.", _increase("preemptions_total")),
    value("Resumes", "In the time shown.", _increase("run_resumes_total")),
    value(
        "Given up",
        "Jobs that had all their attempts, in the whole run.",
        f'sum(swiftbatch_jobs{{{DRIVER}, state="failed"}})',
    ),
)
CHARTS = (
    Panel(
        "Checkpoint age",
        "Time since each busy worker last wrote to a checkpoint, and the time that was wished for.",
        (
            Query(f"max by (worker) (swiftbatch_checkpoint_age_seconds{{{WORKER}}})", "{{worker}}"),
            Query(f"max(swiftbatch_checkpoint_interval_seconds{{{WORKER}}})", "wished for"),
        ),
        "s",
    ),
    stack(
        "Checkpoints written",
        "Bytes per second: token logs, and caches with drafters' tables (state).",
        f"sum by (kind) (rate(swiftbatch_run_checkpoint_bytes_total{{{DRIVER}}}[{RATE}]))",
        "{{kind}}",
        "Bps",
    ),
    lines(
        "Time to write a file",
        "95 % of the files are written faster. It goes on behind the engine's back.",
        "histogram_quantile(0.95, sum by (le, kind)"
        f" (rate(swiftbatch_run_checkpoint_seconds_bucket{{{DRIVER}}}[{RATE}])))",
        "{{kind}}",
        "s",
    ),
    lines(
        "Preemptions by reason",
        "Jobs taken back since the driver started. Migrated ones moved to an idle worker on purpose.",
        f"{_total('preemptions_total', 'reason')} > 0",
        "{{reason}}",
    ),
    lines(
        "Resumes by kind",
        "Since the driver started: the cache was loaded (kv), or the tokens were run again (replay).",
        _total("run_resumes_total", "kind"),
        "{{kind}}",
    ),
    Panel(
        "Tokens recovered and recomputed",
        "Since the driver started. Recomputed ones were in no checkpoint yet.",
        (
            Query(f"sum(swiftbatch_run_tokens_recovered_total{{{DRIVER}}})", "recovered"),
            Query(f"sum(swiftbatch_run_tokens_recomputed_total{{{DRIVER}}})", "recomputed"),
        ),
    ),
    Panel(
        "Trouble with the store",
        "Since the driver started: calls tried again, and results of overtaken attempts that were not written.",
        (
            Query(f"sum(swiftbatch_run_store_retries_total{{{DRIVER}}})", "tried again"),
            Query(f"sum(swiftbatch_run_stale_attempt_rejections_total{{{DRIVER}}})", "overtaken attempts"),
        ),
    ),
    lines(
        "Given up",
        "Jobs that had all their attempts, in the whole run; their reasons are in the run folder.",
        f'sum by (run) (swiftbatch_jobs{{{DRIVER}, state="failed"}})',
        "{{run}}",
    ),
)
DURABILITY = Board("Durability", "What would be lost now, and what was resumed.", NUMBERS + CHARTS)
