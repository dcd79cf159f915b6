"""Extra decoding heads (TokenSwift, section 3.2): linear layers that predict further tokens from one hidden state.

h_i = f_i(h_{i-1}) + h_{i-1} and l_i = g(h_i). h_0 is the target's normed last hidden state, f_i the i-th linear layer,
g the target's language model head. Medusa's heads (Medusa* in the paper's table 3) are independent:
h_i = f_i(h_0) + h_0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear

from swiftbatch.worker.drafters.catalogue import FINGERPRINT, HEADS, HeadKind, read_part
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.model_files import let_others_read

if TYPE_CHECKING:
    from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards

TENSOR = "heads.weight"  # [num_heads, hidden, hidden]
KIND = "kind"  # key in the file's header; files without it have TokenSwift's heads


def head_states(weight: torch.Tensor, hidden: torch.Tensor, kind: HeadKind) -> Iterator[torch.Tensor]:
    """Yield h_1, h_2, ... from h_0 = `hidden [..., hidden]`, in its shape; `weight` [num_heads, hidden, hidden]."""
    before = hidden
    for matrix in weight:
        state = before + linear(before, matrix)
        yield state
        before = hidden if kind == "medusa" else state


class DecodingHeads:
    def __init__(self, weight: torch.Tensor, target: TargetModel, kind: HeadKind = "tokenswift") -> None:
        self.num_heads, self.kind = len(weight), kind
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
        kind = part.header.get(KIND, "tokenswift")
        if kind not in get_args(HeadKind):
            raise part.fault(f"`{KIND}` is {kind!r}; expected one of: {', '.join(get_args(HeadKind))}")
        weight = part.checked({TENSOR: ("num_heads", size, size)})[TENSOR]
        return cls(weight, target, cast("HeadKind", kind))

    def _on_gpu(self) -> HeadsGraph | None:
        """Return the heads' CUDA graph if the target's caches lie in slots, else None."""
        if self._target.forwards.arena is None:
            return None
        from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards

        forwards = self._target.forwards
        return HeadsGraph(self._weight, forwards, self.kind) if isinstance(forwards, CudaForwards) else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[num_heads, vocab] float32` from one row's final hidden state `[hidden]`.

        Head i (from 0) predicts the token i + 2 positions after the row's own.
        """
        if self._graph is not None:
            return self._graph.logits(hidden)
        return self._target.logits(torch.stack(list(head_states(self._weight, hidden, self.kind))))


def save_heads(folder: Path, weight: torch.Tensor, model_fingerprint: str, kind: HeadKind = "tokenswift") -> None:
    """Write heads `[num_heads, hidden, hidden]` in bf16, with their model's fingerprint and their kind."""
    tensors = {TENSOR: weight.detach().to("cpu", torch.bfloat16).contiguous()}
    save_file(tensors, folder / HEADS.name, metadata={FINGERPRINT: model_fingerprint, KIND: kind})
    let_others_read(folder / HEADS.name)


class HeadsGraph:
    """Static buffers and a graph over them and the target's language model head."""

    def __init__(self, weight: torch.Tensor, forwards: CudaForwards, kind: HeadKind) -> None:
        self._weight, self._around, self._kind = weight, forwards.surroundings, kind
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
            before = self._hidden if self._kind == "medusa" else state
        head = self._around.head
        self._around.linear(self._states, head.weight, head.bias, self._logits)
