"""Base classes of the errors that a user can fix."""

from __future__ import annotations

from typing import Literal


class UserError(RuntimeError):
    """An error for the user: one line with what was wrong, where, what was expected and what to do."""


LineCode = Literal[
    "invalid_json_line",
    "missing_required_parameter",
    "unknown_parameter",
    "unsupported_parameter",
    "invalid_type",
    "invalid_value",
    "invalid_url",
    "url_mismatch",
    "duplicate_custom_id",
    "context_length_exceeded",
]
"""Why a line is rejected, by the codes of OpenAI's batches and requests."""


class LineError(ValueError):
    """A line that describes no job."""

    def __init__(self, problem: str, code: LineCode = "invalid_value") -> None:
        super().__init__(problem)
        self.code = code


def line_code(error: Exception) -> LineCode:
    return error.code if isinstance(error, LineError) else "invalid_value"


class GPUFailedError(UserError):
    """A GPU that no longer computes: its process must end, and no job is to blame."""

    gpus: tuple[str, ...] = ()  # UUIDs of all that the process has, since the error seldom tells which one failed


class ModelError(UserError):
    """A model that cannot be found, read or used."""
