"""JSON as bytes, one object a line."""

from __future__ import annotations

import json
import re
from typing import Any

# line ends to some readers (Python's splitlines among them), or commands to terminals: JSON need not escape them
NOT_TEXT = re.compile("[\x7f-\x9f\u2028\u2029]")


def dump_line(value: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON, newline included. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = NOT_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    # lone surrogates have no UTF-8 form
    return text.encode(errors="backslashreplace") + b"\n"
