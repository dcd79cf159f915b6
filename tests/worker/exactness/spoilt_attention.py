"""Attention whose rows depend on neighbours in the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from swiftbatch.worker.forward.transformers_attention import ATTENTION_NAME, attend_in_groups

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def attend_with_neighbours(module: Any, query: torch.Tensor, *tensors: Any, **asked: Any) -> tuple[torch.Tensor, None]:
    """Flip the last bits of a row that another real row follows."""
    output, _ = attend_in_groups(module, query, *tensors, **asked)  # [1, num_rows, num_heads, head_dim]
    bits = output.view(INTEGERS[output.dtype])
    num_rows = sum(len(group) for group in asked["row_groups"])
    bits[:, : num_rows - 1] ^= 1
    return output, None


@contextlib.contextmanager
def rows_that_depend_on_neighbours() -> Iterator[None]:
    AttentionInterface.register(ATTENTION_NAME, attend_with_neighbours)
    yield
    AttentionInterface.register(ATTENTION_NAME, attend_in_groups)
