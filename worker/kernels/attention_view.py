"""The demands of a layer on attention beside plain attention to all positions, for both kinds of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionView:
    """The keys that the rows of a layer see, up to their own, and the changes to their scores."""

    window: int | None = None  # positions that a row sees, the last of them its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [num_heads] scores that take a share and give nothing

    def __post_init__(self) -> None:
        """Raises ValueError for a window or a soft cap of nothing."""
        if (self.window is not None and self.window < 1) or (self.softcap is not None and not self.softcap > 0):
            raise ValueError(f"found a window of {self.window} and a soft cap of {self.softcap}, expected more than 0")


SEES_ALL = AttentionView()
