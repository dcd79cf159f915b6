"""Writes the reference of all metrics: `python -m swiftbatch.metrics.reference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftbatch.metrics.counters import (
    DRIVER_METRICS,
    GPU_METRICS,
    TOTALS,
    WORKER_METRICS,
    DriverCounters,
    EngineCounters,
    GPUFigures,
)
from swiftbatch.metrics.exporter import PREFIX, TOTALS_PREFIX, Labels
from swiftbatch.metrics.metric import Histogram
from swiftbatch.metrics.server_counters import SERVER_METRICS, ServerCounters

if TYPE_CHECKING:
    from swiftbatch.metrics.metric import Metric

PAGE = Path(__file__).with_name("REFERENCE.md")
HEAD = """# Metrics

Written from the code by `python -m swiftbatch.metrics.reference`; a test says when it is stale.

`swiftbatch submit ... --metrics-port 9400` serves `/metrics` of the driver on that port, and of each worker on a free
one, at 127.0.0.1 unless `--address` or `--metrics-host` is given. Both come and go, so Prometheus is to ask the driver
where they are:

```yaml
scrape_configs:
  - job_name: swiftbatch
    scrape_interval: 15s
    http_sd_configs:
      - url: http://DRIVER:9400/sd
        refresh_interval: 15s
```

The discovery adds the label `run`, the run's folder, and `team` if `--team` was given. Every metric of drivers and
workers has the labels {labels}; the drafter is the engine's name, the worker `w1`, `w2`, ...
or `driver`. There are no labels by job: a job's figures are in its result. `swiftbatch serve` serves `/metrics` and
`/sd` on its own port; there `run` is the batch's id and `team` its key's name.

Counters start at 0 with their process. In the totals that the driver serves as `{totals}...`, a lost worker's
counts stay, so they only grow; they miss what a killed worker did after its last report, half a second of work. Sum
either the workers' or the totals, never both. Totals of retries and of ended jobs have the driver's own in them.

Beside this page lie dashboards for Grafana (`grafana/*.json`: import them, or mount them as provisioned files) and
`alerts.yml`, rules for Prometheus (`rule_files`), with their tests in `alerts_test.yml` (`promtool test rules`).

Mean acceptance length = 1 + `spec_decode_num_accepted_tokens_total` / `spec_decode_num_drafts_total`; acceptance rate =
`spec_decode_num_accepted_tokens_total` / `spec_decode_num_draft_tokens_total`.
"""


def render() -> str:
    labels = ", ".join(f"`{name}`" for name in Labels._fields)
    parts = [
        HEAD.replace("{labels}", labels).replace("{totals}", TOTALS_PREFIX),
        _table("Workers", PREFIX, WORKER_METRICS, EngineCounters()),
        _table("GPUs of workers, by the label `gpu`: its UUID", PREFIX, GPU_METRICS, GPUFigures("")),
        _table("Driver", PREFIX, DRIVER_METRICS, DriverCounters()),
        _table("`swiftbatch serve`", PREFIX, SERVER_METRICS, ServerCounters()),
        _table("Driver: totals over all its workers", TOTALS_PREFIX, TOTALS, EngineCounters()),
    ]
    return "\n".join(parts)


def _table(title: str, prefix: str, metrics: Iterable[Metric], counters: Any) -> str:
    rows = [
        f"| `{prefix}{metric.name}` | {metric.kind} | {_label(metric, counters)} | {_meaning(metric, counters)} |"
        for metric in metrics
    ]
    head = ["| name | kind | further label | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _label(metric: Metric, counters: Any) -> str:
    """Return the metric's own label and its initial values."""
    if metric.label is None:
        return ""
    counted = metric.read(counters)
    assert isinstance(counted, Mapping)
    values = list({**dict.fromkeys(metric.label_values), **counted})
    shown = values if len(values) <= 10 else [values[0], "...", values[-1]]
    return f"`{metric.label}`: {', '.join(shown)}"


def _meaning(metric: Metric, counters: Any) -> str:
    value = metric.read(counters)
    for histogram in [value, *value.values()] if isinstance(value, dict) else [value]:
        if isinstance(histogram, Histogram):
            return f"{metric.meaning} Buckets up to {', '.join(f'{bound:g}' for bound in histogram.bounds)}."
    return metric.meaning


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
