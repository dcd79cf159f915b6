"""Causal attention with gradients for training: compiled if this processor multiplies bf16, otherwise torch's."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from swiftbatch.worker.kernels.native_library import Team, chosen_variant, load_library

FAST_VARIANTS = ("avx512-bf16",)  # with AMX, torch multiplies tiles itself
HEAD_DIM = SIDE = 64  # as in source/causal_blocks.h
MOST_THREADS = 16  # each thread has a buffer of all queries' gradients, and a sequence has at most 16 units of work
FUNCTIONS = ("causal_forward", "causal_backward")


class CStridedHeads(ctypes.Structure):
    """`strided_heads` of source/causal.h."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "position_stride")),
    )


class CCausalCall(ctypes.Structure):
    """`causal_call` of source/causal.h."""

    GRADIENTS = ("output_gradient", "query_gradient", "key_gradient", "value_gradient")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch_size", "num_heads", "num_kv_heads", "length", "num_before")),
        ("scaling", ctypes.c_float),
        *((name, CStridedHeads) for name in ("query", "key", "value", "output")),
        ("softmax", ctypes.c_void_p),
        *((name, CStridedHeads) for name in GRADIENTS),
    )


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, before: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Attend with `query [batch, num_heads, length, head_dim]` to the same and earlier positions.

    `key` and `value` are `[batch, num_kv_heads, length, head_dim]`. `before` has the keys and values of earlier
    positions, in blocks of 64 and without gradients. The number of threads does not change the bits of the result.
    Raises ValueError for other shapes.
    """
    _check(query, key, value, before)
    if is_fast(query):
        output: Tensor = _CausalAttention.apply(query, key, value, scaling, before)  # type: ignore[no-untyped-call]
        return output
    is_grouped, mask = query.shape[1] != key.shape[1], None
    if before is not None:
        key, value = (torch.cat([each.detach(), own], dim=2) for each, own in zip(before, (key, value), strict=True))
        mask = _lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )


def _lower_right(num_queries: int, num_keys: int) -> Any:
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes as long as torch

    return causal_lower_right(num_queries, num_keys)


def is_fast(query: Tensor) -> bool:
    """Return whether the compiled kernels support `query`. Raises KernelError as `chosen_variant` does."""
    is_known = query.dtype == torch.bfloat16 and query.shape[3] == HEAD_DIM and query.device.type == "cpu"
    return is_known and query.numel() > 0 and chosen_variant() in FAST_VARIANTS


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, before: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        if before is not None:
            key, value = (torch.cat([each, own], dim=2) for each, own in zip(before, (key, value), strict=True))
        query, key, value = (_side_by_side(each) for each in (query, key, value))
        output, softmax = _empty_like(query), torch.empty(_softmax_shape(query))
        _run("causal_forward", scaling, softmax, query=query, key=key, value=value, output=output)
        ctx.save_for_backward(query, key, value, output, softmax)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, softmax = ctx.saved_tensors
        num_before = key.shape[2] - query.shape[2]
        gradients = _empty_like(query), _empty_like(key[:, :, num_before:]), _empty_like(value[:, :, num_before:])
        named = dict(zip(CCausalCall.GRADIENTS, (_side_by_side(output_gradient), *gradients), strict=True))
        inputs = {"query": query, "key": key, "value": value, "output": output}
        _run("causal_backward", ctx.scaling, softmax, **inputs, **named)
        return *gradients, None, None


def _run(function: str, scaling: float, softmax: Tensor, **heads: Tensor) -> None:
    """Call the kernels with the fields of `causal_call`, and keep all tensors that helper threads may still read."""
    query, key = heads["query"], heads["key"]
    batch_size, num_heads, length, _ = query.shape
    call = CCausalCall(
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        length=length,
        num_before=key.shape[2] - length,
        scaling=scaling,
        softmax=softmax.data_ptr(),
        **{name: CStridedHeads(tensor.data_ptr(), *tensor.stride()[:3]) for name, tensor in heads.items()},
    )
    team = _team(chosen_variant() or "", min(torch.get_num_threads(), MOST_THREADS))
    with team.lock:
        getattr(team.library, function)(team.handle, ctypes.byref(call))
        team.hold([softmax, *heads.values()])


@functools.cache
def _team(variant: str, num_threads: int) -> Team:
    library = load_library(variant)
    for name in FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p)
    return Team(library, num_threads)


def _check(query: Tensor, key: Tensor, value: Tensor, before: tuple[Tensor, Tensor] | None) -> None:
    shapes = [list(each.shape) for each in (query, key, value)]
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(f"found query, key and value {shapes}, expected four axes, and keys and values of one shape")
    batch_size, num_heads, *row = query.shape
    if key.shape[0] != batch_size or list(key.shape[2:]) != row or not key.shape[1] or num_heads % key.shape[1]:
        raise ValueError(f"found query and key {shapes[:2]}, expected the same but for heads that divide the queries'")
    for each in before or ():
        if each.shape[:2] != key.shape[:2] or each.shape[3:] != key.shape[3:] or each.shape[2] % SIDE:
            found = f"found keys {list(key.shape)} and {list(each.shape)} before them"
            raise ValueError(f"{found}, expected the same but for a length that {SIDE} divides")
    kinds = {(each.dtype, each.device) for each in (query, key, value, *(before or ()))}
    if len(kinds) > 1:
        raise ValueError(f"found query, key and value of {sorted(map(str, kinds))}, expected one dtype and device")


def _side_by_side(heads: Tensor) -> Tensor:
    return heads.detach() if heads.stride(3) == 1 else heads.detach().contiguous()


def _empty_like(heads: Tensor) -> Tensor:
    """Allocate `[batch, heads, length, head_dim]` so that all heads of a position are contiguous."""
    batch_size, num_heads, length, head_dim = heads.shape
    return heads.new_empty(batch_size, length, num_heads, head_dim).transpose(1, 2)


def _softmax_shape(query: Tensor) -> tuple[int, ...]:
    batch_size, num_heads, length, _ = query.shape
    return batch_size, num_heads, 2, -(-length // SIDE) * SIDE
