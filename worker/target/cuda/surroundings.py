"""Parts of the target's model on a GPU that a draft model shares with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from swiftbatch.worker.kernels.cuda.linear import LinearKernel
from swiftbatch.worker.kernels.decoder_weights import Linear


@dataclass(frozen=True)
class Surroundings:
    """Embedding and head of the target, and the kernel that makes its products."""

    embedding: Tensor  # [vocab, hidden]
    head: Linear
    linear: LinearKernel
