"""Training logs: records as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import IO, Any


def write_record(log: IO[str], record: Any) -> None:
    """Append a dataclass to a training log, where it can be read at once."""
    log.write(json.dumps(asdict(record)) + "\n")
    log.flush()


def write_measured(log: IO[str], records: Iterable[Any], report: Callable[[str], None]) -> None:
    """Append what was measured to a training log, and tell of it."""
    for record in records:
        write_record(log, record)
        report(record.in_words())
