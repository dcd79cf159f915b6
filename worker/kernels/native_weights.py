"""Weights of a decoder for the compiled kernels: checks, packed matrices as structs, and loading."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, ExpertWeights
from swiftbatch.worker.kernels.kernel_sizes import COUNTS, BlockChoice
from swiftbatch.worker.kernels.layer_specs import RecurrentWeights
from swiftbatch.worker.kernels.quantized_weights import (
    CODE_BITS,
    TABLES,
    Code,
    Linear,
    PackedMatrix,
    Weight,
    plain,
)

ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}  # `element` of source/api.h
# as in source/api.h
CODE_TYPES: dict[Code, int] = {"uint4": 0, "e2m1": 0, "iq4_nl": 0, "int8": 1, "uint8": 2, "e4m3": 3}
# in the order of `scale_type`; the first type that stores all scales exactly is used
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODES_PER_WORD = 8  # with 4 bits, a group must start at a word
LEAST_NORMAL = 2.0**-126  # bf16 products treat smaller numbers as zero
LEAST_SCALE = 2.0**-90  # products of codes with such scales are never subnormal, even if offsets are that small
MOST_SCALE = 2.0**100  # the kernels widen e4m3 with a scale 256 times as large, and round numbers below 2^110


class CDecoderSizes(ctypes.Structure):
    """`decoder_sizes` of source/api.h."""

    SCALES = ("epsilon", "scale", "embedding_scale", "residual_scale", "logit_scale", "score_softcap", "logit_softcap")
    MORE_SCALES = ("attention_in_scale", "key_scale", "attention_out_scale", "gate_scale", "down_scale")
    LAST_SCALES = ("gate_limit", "gate_slope", "value_scale", "ple_scale", "stream_epsilon")
    FORMS = ("norm_form", "activation", "has_gates", "joins_heads", "norms_after_rope", "is_parallel")
    MORE_FORMS = ("qk_norms_differ", "gates_heads", "norms_values")
    LATENT = ("latent_rank", "query_rank", "nope_dim", "value_dim")
    INDEX = ("index_heads", "index_dim", "num_chosen_keys", "index_block")
    COMPRESSED = ("output_groups", "output_rank")
    STREAMS = ("num_streams", "num_sinkhorn")
    PLE = ("ple_dim", "ple_element")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", *COUNTS, *FORMS, *MORE_FORMS, *LATENT, *INDEX)),
        *((name, ctypes.c_int32) for name in (*COMPRESSED, *STREAMS, *PLE)),
        *((name, ctypes.c_float) for name in (*SCALES, *MORE_SCALES, *LAST_SCALES)),
    )


def decoder_sizes_of(sizes: DecoderSizes, blocks: BlockChoice | None = None) -> CDecoderSizes:
    """Return the sizes for C; `blocks` are those that indexers choose."""
    apart = {*CDecoderSizes.LATENT, *CDecoderSizes.INDEX, *CDecoderSizes.COMPRESSED, *CDecoderSizes.STREAMS}
    names = (field[0] for field in CDecoderSizes._fields_[1:] if field[0] not in apart)
    numbers = {name: getattr(sizes, name) for name in names if name not in ("ple_element", "stream_epsilon")}
    numbers |= {"value_dim": sizes.value_dim, "ple_element": ELEMENTS[sizes.ple_dtype]}
    if (latent := sizes.latent) is not None:
        of_vectors = (latent.rank, latent.query_rank, latent.nope_dim, latent.value_dim)
        numbers |= dict(zip(CDecoderSizes.LATENT, of_vectors, strict=True))
        if latent.indexer is not None:
            numbers |= dict(zip(CDecoderSizes.INDEX, (*dataclasses.astuple(latent.indexer), 0), strict=True))
    if blocks is not None:
        of_blocks = (sizes.num_kv_heads, sizes.head_dim, blocks.num_keys, blocks.size)
        numbers |= dict(zip(CDecoderSizes.INDEX, of_blocks, strict=True))
    if (compressed := sizes.compressed) is not None:
        numbers |= {"latent_rank": 0, "value_dim": 0}
        numbers |= {name: getattr(compressed, name) for name in CDecoderSizes.COMPRESSED}
    if (streams := sizes.streams) is not None:
        numbers |= dict(zip((*CDecoderSizes.STREAMS, "stream_epsilon"), dataclasses.astuple(streams), strict=True))
    return CDecoderSizes(element=ELEMENTS[sizes.dtype], **numbers)


class CQuantizedRows(ctypes.Structure):
    """`quantized_rows` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets", "table")),
        *((name, ctypes.c_int32) for name in ("code", "scale_type", "group_size", "as_integers")),
    )


@dataclass(frozen=True)
class QuantizedRows:
    """Struct for C, and the tensors that must live as long as the struct."""

    call: CQuantizedRows
    held: tuple[Tensor | None, ...]
    num_bytes: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self.call)


def quantized_rows(matrix: PackedMatrix, as_integers: bool = False) -> QuantizedRows | None:
    """Return a matrix for the kernels, or None if the kernels would not decode it exactly.

    `as_integers`: its products round their rows to 8 bits, if its form allows that.
    """
    if not _is_exact_in_kernels(matrix):
        return None
    parts = [matrix.scales] if matrix.offsets is None else [matrix.scales, matrix.offsets]
    dtype = next(each for each in SCALE_DTYPES if all(torch.equal(part.to(each).float(), part) for part in parts))
    codes, table = matrix.codes.contiguous(), TABLES[matrix.code].contiguous()
    scales, *offsets = (part.to(dtype).contiguous() for part in parts)
    held = (codes, scales, offsets[0] if offsets else None, table)
    call: Any = CQuantizedRows(
        *(None if each is None else each.data_ptr() for each in held),
        code=CODE_TYPES[matrix.code],
        scale_type=SCALE_DTYPES.index(dtype),
        group_size=matrix.group_size,
        as_integers=as_integers and matrix.is_of_integers,
    )
    return QuantizedRows(call, held, sum(each.nbytes for each in (codes, scales, *offsets)))


class CGivenWeight(ctypes.Structure):
    """`given_weight` of source/api.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("numbers", "quantized", "bias"))


def load_weight(
    load: Callable[[Any], object], weight: Weight, bias: Tensor | None = None, as_integers: bool = False
) -> tuple[Tensor | None, QuantizedRows | None]:
    """Hand a weight and its bias to a function of the kernels. Return what they would read, as numbers or packed."""
    rows = quantized_rows(weight, as_integers) if isinstance(weight, PackedMatrix) else None
    numbers = None if rows is not None else plain(weight).detach().contiguous()
    with_bias = None if bias is None else bias.detach().contiguous()
    given = CGivenWeight(_address(numbers), None if rows is None else rows.address, _address(with_bias))
    load(ctypes.byref(given))
    return numbers, rows


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_exact_in_kernels(matrix: PackedMatrix) -> bool:
    """Return whether all numbers are in the kernels' exact range."""
    if CODE_BITS[matrix.code] == 4 and matrix.group_size % CODES_PER_WORD:
        return False
    if matrix.code == "e4m3" and bool(((matrix.codes & 127) == 127).any()):  # NaN
        return False
    parts = torch.stack([each.abs() for each in (matrix.scales, matrix.offsets) if each is not None])
    if bool((parts > MOST_SCALE).any()):
        return False
    rows = ((parts < LEAST_SCALE) & (parts > 0)).any(dim=0).any(dim=1)
    if not bool(rows.any()):
        return True
    numbers = replace(matrix.rows(rows), dtype=torch.float32).dequantized().abs()
    return not bool(((numbers < LEAST_NORMAL) & (numbers > 0)).any())


ROUTER, CHOICE_BIAS, SHARED_GATE = range(3)  # `expert_role` of source/api.h
EXPERT_ROLES = {"gate": 3, "up": 4, "down": 5}
LATENT_IN, LATENT_OUT, ROUTER_SCALE, CHOICE_SCALES, FRONT_NORM, BEHIND_NORM, CHOICES = range(6, 13)


class CExpertSizes(ctypes.Structure):
    """`expert_sizes` of source/api.h."""

    COUNTS = ("num_experts", "num_chosen", "intermediate", "shared_intermediate", "latent")
    GROUPS = ("num_groups", "num_chosen_groups", "num_best_of_group")
    FORMS = ("score", *GROUPS, "is_normalised", "rounds_logits", "rounds_weights")
    SCALES = ("least_sum", "scale", "jitter", "gate_limit", "gate_slope")
    _fields_ = (
        *((name, ctypes.c_int32) for name in (*COUNTS, *FORMS)),
        *((name, ctypes.c_float) for name in SCALES),
    )


def load_experts(
    library: ctypes.CDLL, handle: int, layer: int, experts: ExpertWeights, shared_intermediate: int, as_integers: bool
) -> None:
    """Load a layer's experts, before its shared expert of `shared_intermediate` columns (0: the layer has none)."""
    sizes = CExpertSizes(
        intermediate=experts.intermediate,
        shared_intermediate=shared_intermediate,
        latent=experts.latent_width,
        gate_limit=experts.gate_limit,
        gate_slope=experts.gate_slope,
        **dataclasses.asdict(experts.routing),
    )
    library.decoder_experts(handle, layer, ctypes.byref(sizes))
    load = functools.partial(library.decoder_load_expert, handle, layer)
    alone = {ROUTER: experts.router, CHOICE_BIAS: experts.choice_bias, SHARED_GATE: experts.shared_gate}
    alone |= {ROUTER_SCALE: experts.router_scale, CHOICE_SCALES: experts.choice_scales}
    alone |= {FRONT_NORM: experts.front_norm, BEHIND_NORM: experts.behind_norm, CHOICES: experts.choices}
    for role, weight in alone.items():
        if isinstance(weight, Linear):
            load_weight(functools.partial(load, role, 0), weight.weight, weight.bias)
        elif weight is not None:
            load_weight(functools.partial(load, role, 0), weight)
    for name, linears in experts.linears().items():
        for number, linear in enumerate(linears):
            load_weight(functools.partial(load, EXPERT_ROLES[name], number), linear.weight, linear.bias, as_integers)
    for role, linear in zip((LATENT_IN, LATENT_OUT), experts.latent or (), strict=False):
        load_weight(functools.partial(load, role, 0), linear.weight, linear.bias, as_integers)


RECURRENT_ROLES = {  # `mixer_role` of source/api.h
    role: number
    for number, role in enumerate(
        (
            *("inputs", "gates", "betas", "steps", "output"),
            *("taps", "tap_bias", "rates", "step_bias", "skip", "norm", "scales"),
        )
    )
}


class CRecurrentSizes(ctypes.Structure):
    """`mixer_sizes` of source/api.h."""

    COUNTS = ("num_heads", "num_key_heads", "key_dim", "value_dim", "num_channels", "conv_width", "norm_width")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("form", *COUNTS)),
        *((name, ctypes.c_float) for name in ("epsilon", "least_step", "most_step", "in_scale", "out_scale")),
    )


def load_recurrent_layer(
    library: ctypes.CDLL, handle: int, layer: int, mixer: RecurrentWeights, as_integers: bool
) -> None:
    """Load the mixer of a layer."""
    sizes = CRecurrentSizes(**dataclasses.asdict(mixer.sizes))
    library.decoder_mixer(handle, layer, ctypes.byref(sizes))
    load = functools.partial(library.decoder_load_mixer, handle, layer)
    for role, linear in mixer.linears.items():
        load_weight(functools.partial(load, RECURRENT_ROLES[role]), linear.weight, linear.bias, as_integers)
    for role, numbers in mixer.floats.items():
        load_weight(functools.partial(load, RECURRENT_ROLES[role]), numbers)


def checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor. Raises ValueError if it has another dtype or shape, or is not on the CPU."""
    _check(name, tensor, shape, dtype)
    return tensor.detach().contiguous()


def check_weights(weights: Iterable[tuple[str, Weight | None, tuple[int, ...]]], dtype: torch.dtype) -> None:
    """Raise ValueError for a weight that has another dtype or shape, or is not on the CPU."""
    for name, weight, shape in weights:
        if weight is not None:
            _check(name, weight, shape, dtype)


def _check(name: str, weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(weight.shape) != shape or weight.dtype != dtype or weight.device.type != "cpu":
        found = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ValueError(f"found {name} of {found}, expected {dtype} {list(shape)} on cpu")
