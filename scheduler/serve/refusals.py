"""The errors that tell a client what it did wrong, as OpenAI's API says it."""

from __future__ import annotations

from swiftbatch.jobs.errors import UserError


class RefusedError(UserError):
    """A request that is not done: its HTTP status, the parameter that is at fault, and a word for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """The error's `type`."""
        return "server_error" if self.status >= 500 else "invalid_request_error"


def no_such_file(file_id: str, param: str = "id") -> RefusedError:
    return RefusedError(f"No such File object: {file_id[:80]}", 404, param)


def no_such_batch(batch_id: str) -> RefusedError:
    return RefusedError(f"No batch found with id '{batch_id[:80]}'.", 404, "batch_id")
