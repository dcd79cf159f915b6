"""The base of all errors that a user can mend."""

from __future__ import annotations


class UserError(RuntimeError):
    """An error whose text is one line for the user: what was wrong, where, what was expected, what to do next."""


class ModelError(UserError):
    """A model that cannot be found, read or used."""
