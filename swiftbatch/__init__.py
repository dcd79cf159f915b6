"""swiftbatch: a batch runner for long-form text generation.

In a checkout `jobs`, `metrics`, `scheduler` and `worker` here are links to the rooms beside this folder. This file
imports nothing of them: a worker asks it where they are before any of them runs. The names that a program may use are
looked up when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftbatch.jobs.errors import UserError as UserError
    from swiftbatch.jobs.run.run_records import Progress as Progress
    from swiftbatch.scheduler.api.python_submit import submit as submit
    from swiftbatch.scheduler.api.python_submit import submit_async as submit_async
    from swiftbatch.scheduler.api.run_handle import RunHandle as Run

__version__ = "0.1.0"
__all__ = ["Progress", "Run", "UserError", "__version__", "submit", "submit_async"]

_PLACES = {
    "Progress": "jobs.run.run_records.Progress",
    "Run": "scheduler.api.run_handle.RunHandle",
    "UserError": "jobs.errors.UserError",
    "submit": "scheduler.api.python_submit.submit",
    "submit_async": "scheduler.api.python_submit.submit_async",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; a program may use {', '.join(__all__)}")
    module, _, own_name = _PLACES[name].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), own_name)
