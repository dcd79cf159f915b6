"""The ids of files and batches: random, of letters and digits alone. No other name ever becomes part of a path."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Literal

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
NUM_BYTES = 12

Delivery = Literal["output", "errors"]
"""The two files that a batch ends with."""


def new_file_id() -> str:
    return f"file-{secrets.token_hex(NUM_BYTES)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(NUM_BYTES)}"


def delivered_file_id(batch_id: str, delivery: Delivery) -> str:
    """The id of a file that a batch ends with: the same however often its end is begun anew."""
    return f"file-{hashlib.sha256(f'{batch_id} {delivery}'.encode()).hexdigest()[: 2 * NUM_BYTES]}"


def is_file_id(name: str) -> bool:
    return FILE_ID.fullmatch(name) is not None


def is_batch_id(name: str) -> bool:
    return BATCH_ID.fullmatch(name) is not None
