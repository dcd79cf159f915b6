"""The decoding heads on a GPU: the logits of all of them from one hidden state, as one graph."""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.cuda.cuda_row_table import NUM_ROWS
from swiftbatch.worker.target.cuda.cuda_forwards import CudaForwards


class HeadsGraph:
    """Static buffers and what runs over them. The language model head is the target's product, at its one shape."""

    def __init__(self, weight: torch.Tensor, forwards: CudaForwards) -> None:
        """`weight [num_heads, hidden, hidden]`."""
        self._weight, self._around = weight, forwards.surroundings
        self._hidden = torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._states = torch.zeros(NUM_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._logits = torch.zeros(NUM_ROWS, forwards.vocab_size, device=weight.device)
        self._graph = forwards.capture(self._work, forwards.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_heads, vocab] float32` from one row's final hidden state `[hidden]`, until the next call."""
        self._hidden.copy_(hidden)
        self._graph.replay()
        return self._logits[: len(self._weight)]

    def _work(self) -> None:
        before = self._hidden
        for matrix, state in zip(self._weight, self._states, strict=False):
            torch.addmv(before, matrix, before, out=state)
            before = state
        head = self._around.head
        self._around.linear(self._states, head.weight, head.bias, self._logits)
