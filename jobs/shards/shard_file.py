"""A shard as a file: Parquet with zstd, or JSON lines, written row by row in bounded memory; and the card of all.

A row is one choice of a line, with the same typed columns in all shards. What is in a row follows from the job and its
tokens alone, so a shard that is made again has the same bytes. `shards/README.md` is the card, which says to
`datasets.load_dataset` where the shards are, and of which types their columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_lines import dump_line
from swiftbatch.jobs.run.output import row_groups
from swiftbatch.jobs.run.output_line_fields import texts_of
from swiftbatch.jobs.shards.shard_settings import Failure, ShardFormat

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

MESSAGE = ("role", "content", "name")
COLUMNS: dict[str, str] = {  # with their types, by names that Arrow and `datasets` share
    "custom_id": "string",
    "choice_index": "int64",
    "revision": "int64",
    "status": "string",
    "prompt": "string",
    "prompt_ids": "list of int64",
    "messages": "list of messages",
    "text": "string",
    "reasoning_content": "string",
    "finish_reason": "string",
    "error_code": "string",
    "error_message": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "int64",
    "max_tokens": "int64",
    "temperature": "float64",
    "sampling": "string",
    "token_ids_sha256": "string",
    "logprobs": "string",
    "job_id": "string",
}
ROWS_PER_GROUP = 1000
CARD_TEXT = """\
# Texts of a swiftbatch run

Each file in `data` is whole and final: the run adds files and never changes one. A row is one choice of one line. Of
rows with the same `custom_id`, those with the highest `revision` are the newest.
"""


def finished_row(record: JobRecord, revision: int, line: dict[str, Any]) -> Row:
    """The row of a job with a result; `line` is its own output line."""
    body = line["response"]["body"]
    choice = body["choices"][0]
    return _asked(record, revision) | {
        "status": "finished",
        **texts_of(choice),
        "error_code": None,
        "error_message": None,
        "completion_tokens": body["usage"]["completion_tokens"],
        "token_ids_sha256": choice.get("token_ids_sha256"),
    }


def failed_row(record: JobRecord, revision: int, failure: Failure) -> Row:
    """The row of a job without a result."""
    return _asked(record, revision) | {
        "status": "cancelled" if failure.code == "cancelled" else "failed",
        "text": None,
        "reasoning_content": None,
        "finish_reason": None,
        "logprobs": None,
        "error_code": failure.code,
        "error_message": failure.message,
        "completion_tokens": None,
        "token_ids_sha256": None,
    }


def _asked(record: JobRecord, revision: int) -> Row:
    """The columns of a row that say what the line asked for."""
    job = record.job
    messages = job.messages and [{name: getattr(message, name) for name in MESSAGE} for message in job.messages]
    return {
        "custom_id": job.custom_id,
        "choice_index": job.choice_index,
        "revision": revision,
        "prompt": job.prompt,
        "prompt_ids": None if job.prompt_ids is None else list(job.prompt_ids),
        "messages": messages,
        "prompt_tokens": record.num_prompt_tokens,
        "seed": _as_int64(job.sampling.seed),
        "max_tokens": job.sampling.max_tokens,
        "temperature": job.sampling.temperature,
        "sampling": json.dumps(job.sampling.identity(), sort_keys=True),
        "job_id": record.job_id,
    }


def _as_int64(seed: int | None) -> int | None:
    """Return a seed where the column can hold it; a larger one stands in `sampling` alone."""
    return seed if seed is not None and seed < 2**63 else None


def write_shard(target: BinaryIO, kind: ShardFormat, rows: Iterable[Row]) -> None:
    """Write all rows. The same rows make the same bytes."""
    if kind == "parquet":
        _write_parquet(target, rows)
        return
    for row in rows:
        target.write(dump_line({name: row[name] for name in COLUMNS}))


def arrow_schema() -> pa.Schema:
    """The columns, all of which may be null."""
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "list of int64": pa.list_(pa.int64()),
        "list of messages": pa.list_(pa.struct([(name, pa.string()) for name in MESSAGE])),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])


def _write_parquet(target: BinaryIO, rows: Iterable[Row]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = arrow_schema()
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for group in row_groups(rows, ROWS_PER_GROUP):
            writer.write_table(pa.Table.from_pylist(group, schema=schema), row_group_size=len(group))


def card(kind: ShardFormat) -> str:
    """The card for shards of a format."""
    features = "".join(_feature(name, column) for name, column in COLUMNS.items())
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: data/*.{kind}\ndataset_info:\n  features:\n{features}---\n\n{CARD_TEXT}"
    )


def _feature(name: str, kind: str) -> str:
    if kind == "list of messages":
        fields = "".join(f"    - name: {field}\n      dtype: string\n" for field in MESSAGE)
        return f"  - name: {name}\n    list:\n{fields}"
    if kind.startswith("list of "):
        return f"  - name: {name}\n    list: {kind.removeprefix('list of ')}\n"
    return f"  - name: {name}\n    dtype: {kind}\n"
