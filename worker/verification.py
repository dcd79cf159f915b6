"""What one verified step tells its drafter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOP_K = 8  # candidates of the target kept at every verified row


@dataclass(frozen=True)
class Verification:
    """Outcome of verifying one draft tree. Row 0 is the root (last committed token), row i + 1 is node i."""

    path: list[int]  # accepted nodes, root side first
    committed_ids: list[int]  # accepted tokens, then the bonus token; cut short where the sequence ends
    row_token_ids: np.ndarray  # [num_rows] int64
    top_ids: np.ndarray | None  # [num_rows, TOP_K] int64, the target's best candidates after each row
    top_logprobs: np.ndarray | None  # [num_rows, TOP_K] float32, of the unprocessed logits

    @property
    def num_draft_tokens(self) -> int:
        return len(self.row_token_ids) - 1

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens; never counts the bonus token."""
        return len(self.path)
