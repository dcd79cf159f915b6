"""Base classes of the errors that a user can fix."""

from __future__ import annotations


class UserError(RuntimeError):
    """An error for the user: one line with what was wrong, where, what was expected and what to do."""


class ModelError(UserError):
    """A model that cannot be found, read or used."""
