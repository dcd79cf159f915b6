"""Extra decoding heads (TokenSwift, section 3.2): linear layers that predict further tokens from one hidden state.

h_i = f_i(h_{i-1}) + h_{i-1} and l_i = g(h_i). h_0 is the target's normed last hidden state, f_i the i-th linear layer,
g the target's language model head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear

from swiftbatch.worker.drafters.catalogue import FINGERPRINT, HEADS, read_part
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.model_files import let_others_read

if TYPE_CHECKING:
    from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards

TENSOR = "heads.weight"  # [num_heads, hidden, hidden]


def head_states(weight: torch.Tensor, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield h_1, h_2, ... from h_0 = `hidden [..., hidden]`, in its shape; `weight` [num_heads, hidden, hidden]."""
    for matrix in weight:
        hidden = hidden + linear(hidden, matrix)
        yield hidden


class DecodingHeads:
    def __init__(self, weight: torch.Tensor, target: TargetModel) -> None:
        self.num_heads = len(weight)
        self._weight = weight.to(target.device, target.dtype)  # [num_heads, hidden, hidden]
        self._target = target
        self._graph = self._on_gpu()

    @classmethod
    def load(cls, parts_folder: Path | None, target: TargetModel) -> DecodingHeads:
        """Read the heads in `parts_folder`, or in the target's own folder if it is None.

        Raises ModelError if there are no heads for this target.
        """
        size = target.hidden_size
        part = read_part(HEADS, target, parts_folder)
        return cls(part.checked({TENSOR: ("num_heads", size, size)})[TENSOR], target)

    def _on_gpu(self) -> HeadsGraph | None:
        """Return the heads' CUDA graph if the target's caches lie in slots, else None."""
        if self._target.forwards.arena is None:
            return None
        from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards

        forwards = self._target.forwards
        return HeadsGraph(self._weight, forwards) if isinstance(forwards, CudaForwards) else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[num_heads, vocab] float32` from one row's final hidden state `[hidden]`.

        Head i (from 0) predicts the token i + 2 positions after the row's own.
        """
        if self._graph is not None:
            return self._graph.logits(hidden)
        return self._target.logits(torch.stack(list(head_states(self._weight, hidden))))


def save_heads(folder: Path, weight: torch.Tensor, model_fingerprint: str) -> None:
    """Write heads `[num_heads, hidden, hidden]` in bf16, with their model's fingerprint."""
    tensors = {TENSOR: weight.detach().to("cpu", torch.bfloat16).contiguous()}
    save_file(tensors, folder / HEADS.name, metadata={FINGERPRINT: model_fingerprint})
    let_others_read(folder / HEADS.name)


class HeadsGraph:
    """Static buffers and a graph over them and the target's language model head."""

    def __init__(self, weight: torch.Tensor, forwards: CudaForwards) -> None:
        self._weight, self._around = weight, forwards.surroundings
        self._hidden = torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._states = torch.zeros(NUM_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._logits = torch.zeros(NUM_ROWS, forwards.vocab_size, device=weight.device)
        self._graph = forwards.capture(self._work, forwards.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_heads, vocab] float32` for one row's `[hidden]`; the next call overwrites it."""
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
