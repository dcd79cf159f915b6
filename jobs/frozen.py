"""The bases of all records that are read or kept: none has a field that is not its own, and none changes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A record of ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """Converts nothing: "5", true and 5.0 are no whole numbers. A silent conversion would hide a mistake."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
