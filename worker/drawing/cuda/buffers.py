"""The sizes and the checks of the buffers that launches are given."""

from __future__ import annotations

import torch

BLOCK = 1024  # tokens of one program; a multiple of 4, which share a counter of the noise
MAX_VOCAB = 2**18  # weights of that many tokens are summed as whole numbers of 2^-44 in 63 bits


def expect(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError for a buffer of another shape or dtype, or whose numbers do not lie side by side."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: found {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}, expected "
            f"{dtype} {list(shape)} side by side"
        )


def expect_logits(logits: torch.Tensor, num_rows: int, least: int = 1) -> None:
    """Raise ValueError for anything but `[num_rows, vocab] float32`, each row's numbers side by side."""
    fits = logits.dim() == 2 and len(logits) == num_rows and logits.dtype == torch.float32
    if not fits or logits.stride(1) != 1 or not least <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"logits: found {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}, expected "
            f"torch.float32 [{num_rows}, {least} to {MAX_VOCAB}], each row's numbers side by side"
        )
