"""The shard settings of a run: whether it writes shards, in which format, and with how many rows each.

shards.json    if a submission asked for them
"""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, ValidationError

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.jobs.run.checked_reading import RunError, pretty, read_model
from swiftbatch.jobs.run.run_records import RUN_VERSION
from swiftbatch.jobs.storage.store import Store

FILE = "shards.json"
MAX_ROWS = 1_000_000

ShardFormat = Literal["parquet", "jsonl"]


class ShardSettings(Frozen):
    """The format stays over all of a run; the number of rows holds for the shards that are yet to be written."""

    version: int = RUN_VERSION
    format: ShardFormat
    rows_per_shard: int = Field(default=1000, ge=1, le=MAX_ROWS)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what a user says, such as "parquet" or "jsonl:500". Raises ValueError."""
        kind, has_rows, rows = text.partition(":")
        try:
            return cls.model_validate({"format": kind} | ({"rows_per_shard": rows} if has_rows else {}))
        except ValidationError:
            formats = " or ".join(get_args(ShardFormat))
            expected = f"expected {formats}, and behind a colon 1 to {MAX_ROWS:,} rows, as in parquet:500"
            raise ValueError(f"found {text!a}, {expected}") from None


def shard_settings(store: Store) -> ShardSettings | None:
    """The shards that the run was asked for; None if it writes none. Raises RunError for a damaged file."""
    return read_model(store, FILE, ShardSettings)


def ask_for_shards(store: Store, settings: ShardSettings) -> None:
    """Have the run write shards from now on; those who hold it may say so. Raises RunError for another format."""
    before = shard_settings(store)
    if before is not None and before.format != settings.format:
        raise RunError(
            f"the run at {store.shown_uri} has shards of format {before.format}, found {settings.format}: "
            f"use --output-shards {before.format}, leave the option away, or use another run folder"
        )
    if before != settings:
        store.write(FILE, pretty(settings))
