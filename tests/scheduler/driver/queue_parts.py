from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from swiftbatch.jobs.run.job_index import COLUMNS, JobEntry, JobIndex
from swiftbatch.jobs.run.job_table import table_schema
from swiftbatch.jobs.shared_prompts import SharedPrompt
from swiftbatch.scheduler.driver.waiting_jobs import NO_GROUP, UntouchedJobs


def untouched(entries: Sequence[JobEntry], prompts: Sequence[SharedPrompt], priorities: Sequence[int]) -> UntouchedJobs:
    rows = [
        {name: getattr(entry, name, None) for name in COLUMNS} | {"prompt_keys": b"", "supersedes": None}
        for entry in entries
    ]
    schema = pa.schema([table_schema().field(name) for name in COLUMNS])
    groups = [NO_GROUP if prompt.group is None else prompt.group for prompt in prompts]
    return UntouchedJobs(
        JobIndex.of([pa.Table.from_pylist(rows, schema=schema)]),
        np.array(priorities, np.int64),
        np.array(groups, np.int32),
        np.array([prompt.num_tokens for prompt in prompts], np.int32),
    )
