"""Streams that may fail without ending a run."""

from __future__ import annotations

import os
from typing import Any, TextIO


class SteadyStream:
    """A text stream that drops output after its first failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._turn_away()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._turn_away()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _turn_away(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Lines:
    """A stream of whole lines, dropped after its first failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = SteadyStream(stream)

    def write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()
