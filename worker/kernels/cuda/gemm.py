"""Matrix products of a forward on a GPU: cuBLAS, plain Triton, and Triton with quantized weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, in_one_place, narrowed, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, NUM_ROWS, fills_blocks
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedMatrix, Weight

TILE_COLUMNS = 32  # small enough to occupy every multiprocessor
PLAIN_FORM = {"IS_PACKED": False, "DECODE": None, "PER_BYTE": 1, "NUM_GROUPS": 1, "GROUP": 1, "HAS_OFFSETS": False}
NO_PARTS = (None,) * 3
MOST_TILE_BYTES = 256  # pipelined blocks must fit an A100's shared memory


class LinearKernel(Protocol):
    """Product `rows [num_rows, depth] @ weight [columns, depth].T + bias [columns]`, summed in float32."""

    def __call__(self, rows: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """Write `out [num_rows, columns]`, in the rows' dtype or float32."""


def cublas_linear(rows: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
    """Multiply with cuBLAS, on a CPU with torch's library if `out` has the rows' dtype; packed weights in Triton."""
    if isinstance(weight, PackedMatrix):
        triton_linear(rows, weight, bias, out)
    elif out.dtype != rows.dtype:
        torch.ops.aten.mm.dtype_out(rows, weight.t(), out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


# Codes of packed weights, decoded in registers.


@triton.jit
def unsigned(code):
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def signed_byte(code):
    """Decode two's complement: a code with its highest bit flipped is the number plus 128."""
    return (code ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def e2m1(code):
    """Move sign, exponent and mantissa to their places in float32; the factor 2^126 corrects the exponent's bias."""
    return (((code << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3(code):
    """Move sign, exponent and mantissa to their places in float32.

    The factor 2^120 corrects the exponent's bias. NaN is not supported.
    """
    return (((code << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def iq4_nl(code):
    """Look up one of 16 bytes, each the number plus 128."""
    low = tl.where((code & 4) == 0, 0x3F2D1801, 0x766A5D4F)
    high = tl.where((code & 4) == 0, -0x5966727F, -0x0E263A4B)
    byte = (tl.where((code & 8) == 0, low, high) >> ((code & 3) * 8)) & 0xFF
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


DECODERS: dict[Code, Any] = {
    "uint4": unsigned,
    "e2m1": e2m1,
    "iq4_nl": iq4_nl,
    "int8": signed_byte,
    "uint8": unsigned,
    "e4m3": e4m3,
}


@triton.jit
def read(pointers, is_there, IS_WHOLE: tl.constexpr):
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=is_there, other=0)


@triton.jit
def unpacked(codes, PER_BYTE: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return int32 codes `[DEPTH, COLUMNS]` of bytes `[DEPTH / PER_BYTE, COLUMNS]`, low halves first."""
    codes = codes.to(tl.int32)
    if PER_BYTE == 2:
        codes = tl.join(codes & 15, codes >> 4).permute(0, 2, 1).reshape([DEPTH, COLUMNS])
    return codes


@triton.jit
def of_members(numbers, GROUPS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Repeat float32 values of groups, `[GROUPS, COLUMNS]`, for each member of a group."""
    if GROUPS > 1:
        numbers = tl.broadcast_to(numbers[:, None, :], [GROUPS, DEPTH // GROUPS, COLUMNS]).reshape([DEPTH, COLUMNS])
    return numbers


@triton.jit
def packed_block(
    codes_ptr, scales_ptr, offsets_ptr, rows, start,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, DECODE: tl.constexpr,
    PER_BYTE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Decode `BLOCK_DEPTH` numbers from `start` on of a matrix's `rows [COLUMNS] int64`.

    Returns float32 `[BLOCK_DEPTH, COLUMNS]`.
    """
    GROUPS: tl.constexpr = max(1, BLOCK_DEPTH // GROUP)
    IS_WHOLE: tl.constexpr = DEPTH % BLOCK_DEPTH == 0
    places, groups = tl.arange(0, BLOCK_DEPTH // PER_BYTE), tl.arange(0, GROUPS)
    codes_ptr += rows[None, :] * (DEPTH // PER_BYTE) + places[:, None]
    group_places = rows[None, :] * NUM_GROUPS + groups[:, None]
    left, first_group = DEPTH - start, start // GROUP
    codes = read(codes_ptr + start // PER_BYTE, (places * PER_BYTE < left)[:, None], IS_WHOLE)
    scales = read(scales_ptr + group_places + first_group, (groups * GROUP < left)[:, None], IS_WHOLE)
    numbers = DECODE(unpacked(codes, PER_BYTE, BLOCK_DEPTH, COLUMNS))
    numbers *= of_members(scales, GROUPS, BLOCK_DEPTH, COLUMNS)
    if HAS_OFFSETS:
        offsets = read(offsets_ptr + group_places + first_group, (groups * GROUP < left)[:, None], IS_WHOLE)
        numbers += of_members(offsets, GROUPS, BLOCK_DEPTH, COLUMNS)
    return in_one_place(numbers, BLOCK_DEPTH, COLUMNS)


# Products of one kernel for plain and packed weights.


@triton.jit
def multiply_columns(
    input_ptr, weight_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr, num_columns,
    TILE_ROWS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, IS_PACKED: tl.constexpr, DECODE: tl.constexpr,
    PER_BYTE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns): sums the blocks along the depth in order, then adds the bias."""
    IS_WHOLE: tl.constexpr = DEPTH % BLOCK_DEPTH == 0
    rows = tl.arange(0, TILE_ROWS)
    input_ptr += tl.program_id(0) * TILE_ROWS * DEPTH
    out_ptr += tl.program_id(0) * TILE_ROWS * num_columns
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < num_columns
    known = tl.where(is_column, columns, 0).to(tl.int64)  # padding columns read column 0 and are not stored
    depth = tl.arange(0, BLOCK_DEPTH)
    input_ptr += rows[:, None] * DEPTH + depth[None, :]
    if not IS_PACKED:
        weight_ptr += known[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        x = read(input_ptr + start, (depth < DEPTH - start)[None, :], IS_WHOLE)
        if IS_PACKED:
            numbers = packed_block(
                codes_ptr, scales_ptr, offsets_ptr, known, start,
                DEPTH, TILE_COLUMNS, BLOCK_DEPTH, DECODE, PER_BYTE, NUM_GROUPS, GROUP, HAS_OFFSETS,
            )  # fmt: skip
            w = narrowed(numbers, x.dtype)
        else:
            w = read(weight_ptr + start, (depth < DEPTH - start)[:, None], IS_WHOLE)
        acc = dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + known).to(tl.float32)[None, :]
    out_ptr += rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr, rounded(acc, out_ptr.dtype.element_ty), mask=is_column[None, :])


def triton_linear(rows: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
    """Multiply in Triton, on a CPU in its interpreter; a packed weight gives the bits of the dequantized one."""
    num_columns = weight.shape[0]
    grid = len(rows) // tile_rows(rows), triton.cdiv(num_columns, TILE_COLUMNS)  # programs of the same columns in turn
    multiply_columns[grid](
        rows, *weight_arguments(weight), bias, out, num_columns,
        **multiply_constants(weight, bias is not None, tile_rows(rows)),
    )  # fmt: skip


def weight_arguments(weight: Weight) -> tuple[Tensor | None, ...]:
    """Return a plain weight, then codes, scales and offsets of a packed one."""
    return (
        (None, weight.codes, weight.scales, weight.offsets) if isinstance(weight, PackedMatrix) else (weight, *NO_PARTS)
    )


def tile_rows(rows: Tensor) -> int:
    """Return the rows per program: all rows, or as many as shared memory allows."""
    return min(len(rows), MOST_TILE_BYTES // rows.element_size())


def multiply_constants(weight: Weight, has_bias: bool, num_tile_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Return constants, warps and stages of `multiply_columns`."""
    return form_constants(weight) | {
        "TILE_ROWS": num_tile_rows,
        "DEPTH": weight.shape[1],
        "HAS_BIAS": has_bias,
        "TILE_COLUMNS": TILE_COLUMNS,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "num_warps": 4,
        "num_stages": 4,
    }


def form_constants(weight: Weight) -> dict[str, Any]:
    """Return the constants of a weight's form, packed or not."""
    if not isinstance(weight, PackedMatrix):
        return PLAIN_FORM
    depth, num_groups = weight.shape[1], weight.scales.shape[1]
    return {
        "IS_PACKED": True,
        "DECODE": DECODERS[weight.code],
        "PER_BYTE": 8 // CODE_BITS[weight.code],
        "NUM_GROUPS": num_groups,
        "GROUP": weight.group_size if num_groups > 1 else max(depth, BLOCK_DEPTH),
        "HAS_OFFSETS": weight.offsets is not None,
    }


LINEAR_KERNELS: dict[LinearName, LinearKernel] = {"cublas": cublas_linear, "triton": triton_linear}


def packed_gemm(rows: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return float32 `[..., columns]` of any number of rows `[..., depth]`."""
    blocks = [
        nn.functional.pad(block, (0, 0, 0, NUM_ROWS - len(block))) for block in rows.flatten(0, -2).split(NUM_ROWS)
    ]
    out = torch.empty(len(blocks) * NUM_ROWS, weight.shape[0], device=rows.device)
    for block, found in zip(blocks, out.split(NUM_ROWS), strict=True):
        triton_linear(block, weight, bias, found)
    return out[: rows.shape[:-1].numel()].view(*rows.shape[:-1], -1)


def is_multiplied_packed(weight: PackedMatrix) -> bool:
    """Return whether `triton_linear` supports a matrix: groups fit blocks, and no code is NaN.

    Float32 is not supported: without tensor cores, registers would spill.
    """
    fits = fills_blocks(weight.group_size, weight.shape[1])
    is_known = weight.code != "e4m3" or not ((weight.codes & 127) == 127).any()
    return weight.dtype == torch.bfloat16 and fits and bool(is_known)
