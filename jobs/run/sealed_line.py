"""A JSON line that ends with the checksum of all that stands before it: a changed character is noticed."""

from __future__ import annotations

import hashlib
import re

KEY = "line_sha256"
SEAL = re.compile(rb', "line_sha256": "([^"]*)"\}\n\Z')


def sealed(line: bytes) -> bytes:
    """Add its checksum to a JSON object with something in it, a line of bytes with its newline."""
    return line[:-2] + f', "{KEY}": "{hashlib.sha256(line).hexdigest()}"}}\n'.encode()


def unsealed(data: bytes) -> bytes:
    """Return the line as it was sealed; an older version's has no checksum. Raises ValueError for a changed one."""
    found = SEAL.search(data)
    if found is None:
        if KEY.encode() in data[-len(KEY) - 80 :]:
            raise ValueError("found a checksum that is cut off")
        return data
    line = data[: found.start()] + b"}\n"
    if hashlib.sha256(line).hexdigest() != found[1].decode(errors="replace"):
        raise ValueError("found content that does not match its checksum")
    return line
