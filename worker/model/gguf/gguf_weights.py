"""The weights of a GGUF file, read and hashed in one pass.

Quantized blocks become packed matrices of the numbers that ggml defines in float32. Codes of other widths than 4 and 8
bits are widened. A zero of Q4_0 may have another sign than in ggml.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedMatrix, Weight
from swiftbatch.worker.model.architectures.spec import GGUFSpec
from swiftbatch.worker.model.digests import HashedStream
from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, form_of_link, num_experts_in, transformers_name
from swiftbatch.worker.model.gguf.header import GGUFError, TensorHead, read_head

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRED = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}  # key of the number of heads of each
RAISED = "norm.weight"
SHARED_GATE = "shared_expert_gate.weight"  # stored as a vector instead of a matrix with one row

PIECE = 1 << 24  # bytes per read between tensors


def gguf_weights(
    file: Path, hashed: HashedStream, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """Yield a linked file's weights by `transformers`' names. Raises ValueError for a damaged file."""
    head, form = read_head(file), form_of_link(file)
    if hashlib.sha256(hashed.read(head.num_bytes)).hexdigest() != head.sha256:
        raise GGUFError("it has changed while it was read")
    place = 0
    for tensor in head.tensors:
        _pass_over(hashed, tensor.offset - place)
        data = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        hashed.fill(memoryview(cast(Any, data.numpy())))
        place = tensor.offset + tensor.num_bytes
        if tensor.name != FREQUENCIES:
            name = transformers_name(tensor.name, form)
            yield from weights_of(name, tensor, data, form, config, dtype)
    _pass_over(hashed, os.fstat(hashed.stream.fileno()).st_size - head.num_bytes - place)


def _pass_over(hashed: HashedStream, size: int) -> None:
    while size > 0:
        size -= len(hashed.read(min(size, PIECE)))


def weights_of(
    name: str, tensor: TensorHead, data: Tensor, form: GGUFSpec, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """Yield a stored tensor's weights: one, or one for each expert. Raises GGUFError.

    Undoes what llama.cpp changes: paired rows of queries and keys, and norms with 1 added.
    """
    if "*" in name:
        for number, one in enumerate(data.view(num_experts_in(tensor), -1)):
            yield name.replace("*", str(number)), _weight(tensor, one, tensor.shape[1:], dtype)
        return
    shape = (1, *tensor.shape) if name.endswith(SHARED_GATE) and len(tensor.shape) == 1 else tensor.shape
    weight = _weight(tensor, data, shape, dtype)
    if form.has_raised_norms and name.endswith(RAISED):
        weight = _numbers(weight) - 1
    for part, key in PAIRED.items():
        if form.has_paired_heads and part in name:
            weight = _apart(weight, config[key], tensor.name)
    yield name, weight


def _weight(tensor: TensorHead, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Return a quantized matrix packed, and any other tensor dequantized."""
    if tensor.type.name in NUMBERS:
        return data.view(NUMBERS[tensor.type.name]).view(shape)
    num_rows = shape[0] if len(shape) == 2 else 1
    try:
        packed = packed_from(tensor.type.name, data.view(-1, tensor.type.num_bytes), num_rows, dtype)
    except ValueError as error:
        raise GGUFError(f"its tensor {tensor.name} of {tensor.type.name} can't be unpacked: {error}") from None
    return packed if len(shape) == 2 else packed.dequantized().view(shape)


def _numbers(weight: Weight) -> Tensor:
    return (weight.dequantized() if isinstance(weight, PackedMatrix) else weight).float()


def _apart(weight: Weight, num_heads: int, name: str) -> Weight:
    """Separate the halves of each head, whose rows alternate in the file."""
    num_rows = weight.shape[0]
    if num_rows % (2 * num_heads):
        raise GGUFError(f"its tensor {name} has {num_rows:,} rows for {num_heads} heads")
    order = torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return weight.rows(order) if isinstance(weight, PackedMatrix) else weight[order]


MOST_AT_ONCE = 1 << 20  # bytes of blocks that are unpacked at once, so that the result stays in a core's cache

Array = np.ndarray


class BlockParts(NamedTuple):
    """One byte per code, and a float32 scale per group."""

    code: Code
    codes: Array
    scales: Array
    offsets: Array | None = None


def packed_from(name: str, blocks: Tensor, num_rows: int, dtype: torch.dtype) -> PackedMatrix:
    """Unpack blocks, `[num_blocks, num_bytes] uint8`. Raises ValueError for infinite scales.

    Threads with numpy unpack some rows each, because torch's own threads wait for each other after every operation.
    """
    rows = blocks.numpy().reshape(num_rows, -1, blocks.shape[1])
    step = max(1, MOST_AT_ONCE // rows[0].size)

    def unpack(start: int) -> BlockParts:
        some = rows[start : start + step]
        with np.errstate(invalid="ignore"):  # infinite scales raise an error below
            return _by_rows(UNPACKED[name](some.reshape(-1, some.shape[2])), len(some))

    with ThreadPoolExecutor() as threads:
        parts = list(threads.map(unpack, range(0, num_rows, step)))
    codes, scales = (np.concatenate(each) for each in ([each.codes for each in parts], [each.scales for each in parts]))
    found = [each.offsets for each in parts if each.offsets is not None]
    offsets = torch.from_numpy(np.concatenate(found)) if found else None
    return PackedMatrix(parts[0].code, torch.from_numpy(codes), torch.from_numpy(scales), dtype, offsets)


def _by_rows(parts: BlockParts, num_rows: int) -> BlockParts:
    """Arrange the parts by rows. Raises ValueError for infinite scales."""
    code, codes, scales, offsets = parts
    if not np.isfinite(scales).all() or (offsets is not None and not np.isfinite(offsets).all()):
        raise ValueError("found scales that are no finite numbers")
    codes = codes.reshape(num_rows, -1)
    if CODE_BITS[code] == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return BlockParts(
        code, codes, scales.reshape(num_rows, -1), None if offsets is None else offsets.reshape(num_rows, -1)
    )


def _split(blocks: Array, *widths: int) -> list[Array]:
    return np.split(blocks, np.cumsum(widths[:-1]), axis=1)


def _halves(data: Array) -> Array:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _fields(data: Array, width: int, bits: int) -> Array:
    """Unpack fields of some bits, the lowest of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Array = (data.reshape(len(data), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _scales_and_minima(data: Array) -> tuple[Array, Array]:
    """Unpack two lists of eight 6-bit numbers from twelve bytes."""
    scales, minima, rest = _split(data, 4, 4, 4)
    low = np.concatenate((scales & 63, (rest & 15) | ((scales >> 2) & 48)), axis=1)
    high = np.concatenate((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), axis=1)
    return low.astype(np.float32), high.astype(np.float32)


def _q4_0(blocks: Array) -> BlockParts:
    scales, codes = _split(blocks, 2, 16)
    return BlockParts("uint4", _fields(codes, 16, 4), _halves(scales), _halves(scales) * -8)


def _q4_1(blocks: Array) -> BlockParts:
    scales, minima, codes = _split(blocks, 2, 2, 16)
    return BlockParts("uint4", _fields(codes, 16, 4), _halves(scales), _halves(minima))


def _q5_0(blocks: Array) -> BlockParts:
    scales, fifth, codes = _split(blocks, 2, 4, 16)
    codes = _fields(codes, 16, 4) | (_fields(fifth, 1, 1) << 4)
    return BlockParts("int8", codes - np.uint8(16), _halves(scales))


def _q5_1(blocks: Array) -> BlockParts:
    scales, minima, fifth, codes = _split(blocks, 2, 2, 4, 16)
    codes = _fields(codes, 16, 4) | (_fields(fifth, 1, 1) << 4)
    return BlockParts("uint8", codes, _halves(scales), _halves(minima))


def _q8_0(blocks: Array) -> BlockParts:
    scales, codes = _split(blocks, 2, 32)
    return BlockParts("int8", codes, _halves(scales))


def _q2_k(blocks: Array) -> BlockParts:
    both, codes, scale, minimum = _split(blocks, 16, 64, 2, 2)
    scales, offsets = _halves(scale) * (both & 15).astype(np.float32), _halves(minimum) * (both >> 4).astype(np.float32)
    return BlockParts("uint4", _fields(codes, 32, 2), scales, -offsets)


def _q3_k(blocks: Array) -> BlockParts:
    third, codes, both, scale = _split(blocks, 32, 64, 12, 2)
    low, high = _split(both, 8, 4)
    scales = (_fields(low, 8, 4) | (_fields(high, 4, 2) << 4)).astype(np.float32) - 32
    codes = _fields(codes, 32, 2) | (_fields(third, 32, 1) << 2)
    return BlockParts("int8", codes - np.uint8(4), _halves(scale) * scales)


def _q4_k(blocks: Array) -> BlockParts:
    scale, minimum, both, codes = _split(blocks, 2, 2, 12, 128)
    scales, minima = _scales_and_minima(both)
    return BlockParts("uint4", _fields(codes, 32, 4), _halves(scale) * scales, -(_halves(minimum) * minima))


def _q5_k(blocks: Array) -> BlockParts:
    scale, minimum, both, fifth, codes = _split(blocks, 2, 2, 12, 32, 128)
    scales, minima = _scales_and_minima(both)
    codes = _fields(codes, 32, 4) | (_fields(fifth, 32, 1) << 4)
    return BlockParts("uint8", codes, _halves(scale) * scales, -(_halves(minimum) * minima))


def _q6_k(blocks: Array) -> BlockParts:
    codes, upper, scales, scale = _split(blocks, 128, 64, 16, 2)
    codes = _fields(codes, 64, 4) | (_fields(upper, 32, 2) << 4)
    return BlockParts("int8", codes - np.uint8(32), _halves(scale) * scales.view(np.int8).astype(np.float32))


def _iq4_nl(blocks: Array) -> BlockParts:
    scales, codes = _split(blocks, 2, 16)
    return BlockParts("iq4_nl", _fields(codes, 16, 4), _halves(scales))


def _iq4_xs(blocks: Array) -> BlockParts:
    scale, upper, lower, codes = _split(blocks, 2, 2, 4, 128)
    scales = (_fields(lower, 1, 4) | (_fields(upper, 1, 2) << 4)).astype(np.float32) - 32
    return BlockParts("iq4_nl", _fields(codes, 16, 4), _halves(scale) * scales)


UNPACKED: dict[str, Callable[[Array], BlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
