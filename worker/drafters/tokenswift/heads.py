"""Extra decoding heads (TokenSwift, section 3.2): linear layers that predict further tokens from one hidden state.

h_i = f_i(h_{i-1}) + h_{i-1} and l_i = g(h_i), where h_0 is the target's last hidden state (behind its final norm), f_i
the i-th linear layer and g the target's own language model head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import linear

from worker.drafters.parts import FINGERPRINT
from worker.model.files import HEADS_FILE, ModelError
from worker.target.target import TargetModel

__all__ = ["HEADS_FILE", "DecodingHeads", "head_states", "save_heads"]

TENSOR = "heads.weight"  # [num_heads, hidden, hidden]


def head_states(weight: torch.Tensor, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield h_1, h_2, ... from h_0 = `hidden [..., hidden]`, in its shape; `weight` [num_heads, hidden, hidden]."""
    for matrix in weight:
        hidden = hidden + linear(hidden, matrix)
        yield hidden


class DecodingHeads:
    """Trained heads of one target model, in its dtype and on its device."""

    def __init__(self, weight: torch.Tensor, target: TargetModel) -> None:
        self.num_heads = len(weight)
        self._weight = weight.to(target.device, target.dtype)  # [num_heads, hidden, hidden]
        self._target = target

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> DecodingHeads:
        """Read the heads in `folder`. Raises ModelError where there are none that fit the target."""
        path = folder / HEADS_FILE
        training = f"swiftbatch train tokenswift --model {target.files.name} --data DIR --output {folder}"
        if not path.is_file():
            raise ModelError(f"heads {path}: no such file; train them with `{training}`")
        try:
            with safe_open(path, framework="pt") as file:
                fingerprint = (file.metadata() or {}).get(FINGERPRINT, "none")
                weight: torch.Tensor = file.get_tensor(TENSOR)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"heads {path}: not a safetensors file with `{TENSOR}`: {error}") from error
        expected = target.files.fingerprint
        if fingerprint != expected:
            raise ModelError(
                f"heads {path}: trained for the model with fingerprint {fingerprint[:12]}, but {target.files.name} "
                f"has {expected[:12]}; train heads for it with `{training}`"
            )
        _check_weight(path, weight, target.model.config.hidden_size)
        return cls(weight, target)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[num_heads, vocab] float32` from one row's final hidden state `[hidden]`.

        Head i (from 0) predicts the token i + 2 places behind the row's own; the language model head predicts the
        one place behind it.
        """
        return self._target.logits(torch.stack(list(head_states(self._weight, hidden))))


def save_heads(folder: Path, weight: torch.Tensor, model_fingerprint: str) -> None:
    """Write heads `[num_heads, hidden, hidden]` in bf16, with the fingerprint of their model, to `folder`."""
    tensors = {TENSOR: weight.detach().to("cpu", torch.bfloat16).contiguous()}
    save_file(tensors, folder / HEADS_FILE, metadata={FINGERPRINT: model_fingerprint})


def _check_weight(path: Path, weight: torch.Tensor, hidden_size: int) -> None:
    """Refuse anything but finite `[num_heads, hidden, hidden]`."""
    fits = weight.ndim == 3 and len(weight) > 0 and weight.shape[1:] == (hidden_size, hidden_size)
    if not fits or not weight.is_floating_point():
        raise ModelError(
            f"heads {path}: `{TENSOR}` is {weight.dtype} {list(weight.shape)}; expected floats "
            f"[num_heads, {hidden_size}, {hidden_size}], as this model's hidden states need; train them anew"
        )
    if not weight.isfinite().all():
        raise ModelError(f"heads {path}: `{TENSOR}` has values that are not finite; train them anew")
