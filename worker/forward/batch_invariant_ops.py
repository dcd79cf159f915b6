"""Elementwise functions and experts of `transformers` models with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swiftbatch.worker.kernels.kernel_sizes import FEWEST_COLUMNS, TILE_ROWS

VECTORS = 64  # numbers in two vectors of bf16, the most that a loop step processes
ON_ONE_THREAD = 16384  # numbers up to which torch uses one thread in all of these functions

CURVED: frozenset[Callable[..., Any]] = frozenset(  # functions whose bits were found to depend on the batch
    [
        *(functional.silu, functional.gelu, functional.softplus, functional.mish, functional.elu, functional.selu),
        *(functional.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.exp2),
    ]
)


def has_rests(decoder: torch.nn.Module, least_rows: int) -> bool:
    """Return whether an elementwise loop over a layer's rows may end with scalar steps for the remainder."""
    weights = ((name, each) for name, each in decoder.named_parameters() if each.ndim >= 2 and "embed" not in name)
    widths = {width for name, each in weights for width in each.shape[-2:] if width >= FEWEST_COLUMNS}
    is_shared_out = torch.get_num_threads() > 1 and TILE_ROWS * max(widths, default=0) > ON_ONE_THREAD
    return is_shared_out or any(least_rows * width % VECTORS for width in widths)


class WholeVectors(TorchFunctionMode):
    """Makes torch compute exponential functions in whole vectors, on one thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CURVED or not args or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return in_whole_vectors(func, *args, **kwargs)


def in_whole_vectors(function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply an elementwise function in calls without a scalar remainder, each on one thread."""
    flat = numbers.reshape(-1)
    padded = pad(flat, (0, -len(flat) % VECTORS))
    parts = [function(part, *args, **kwargs) for part in padded.split(ON_ONE_THREAD)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[: len(flat)].view(numbers.shape)


# Row-exact mixture of experts: each expert runs whole tiles, so a row's bits do not depend on other rows.


EXPERTS_NAME = "swiftbatch_whole_tiles"


def run_experts(
    module: Any,
    hidden_states: torch.Tensor,  # [num_rows, hidden]
    top_k_index: torch.Tensor,  # [num_rows, top_k]
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run `transformers`' experts, `[num_rows, hidden]`; sum each row's experts in the order in which it chose them."""
    outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[1])
    for expert in top_k_index.unique().tolist():
        rows, choices = (top_k_index == expert).nonzero(as_tuple=True)
        states = pad(hidden_states[rows], (0, 0, 0, -len(rows) % TILE_ROWS))
        outputs[rows, choices] = _run_expert(module, expert, states)[: len(rows)]
    return (outputs * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _run_expert(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        states = module._apply_gate(_project(module, "gate_up_proj", expert, states))
    else:
        states = module.act_fn(_project(module, "up_proj", expert, states))
    states = _project(module, "down_proj", expert, states)
    return module.post_expert_norm(states) if module.has_post_expert_norm else states


def _project(module: Any, name: str, expert: int, states: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return linear(states, weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, run_experts)
