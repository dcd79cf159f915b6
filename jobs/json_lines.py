"""JSON as bytes, one object a line."""

from __future__ import annotations

import json
from typing import Any

# line ends to some readers (Python's splitlines among them), and JSON need not escape them
LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def dump_line(value: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON, newline included. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for letter, escape in LINE_ENDS.items():
        text = text.replace(letter, escape)
    # lone surrogates have no UTF-8 form
    return text.encode(errors="backslashreplace") + b"\n"
