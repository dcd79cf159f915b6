"""Matrix products of a forward on a GPU: cuBLAS, plain Triton, and Triton with quantized weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.kernels.cuda.repacked_weights import FACTORS, RepackedMatrix
from swiftbatch.worker.kernels.cuda.triton_primitives import INTERPRETED, dot, in_one_place, narrowed, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, NUM_ROWS
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedMatrix, Weight

PLAIN_FORM = {"IS_PACKED": False, "DECODE": None, "ASSEMBLY": None, "PLACES": 1, "ZERO": 0, "FACTOR": 1.0}
PLAIN_FORM |= {"PADDED_DEPTH": 0, "GROUP": 1, "IS_NARROW": False, "HAS_OFFSETS": False}
MOST_TILE_COLUMNS = 128
TILE_COLUMNS = 32  # in float32, which has no tensor cores, and of products per head
MANY_COLUMNS = 16384  # with fewer, tiles are smaller to occupy every multiprocessor
FEW_TILE_COLUMNS = 64
MOST_TILE_BYTES = 256  # pipelined blocks must fit an A100's shared memory


class LinearKernel(Protocol):
    """Product `rows [num_rows, depth] @ weight [columns, depth].T + bias [columns]`, summed in float32."""

    def __call__(self, rows: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """Write `out [num_rows, columns]`, in the rows' dtype or float32.

        In Triton, `out [num_parts, num_rows, columns] float32` gets the sums of as many parts of the depth.
        """


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


# Codes of packed weights as numbers: of one code, as the interpreter and other kernels decode it.


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

# The same for two words at a time, in PTX: the last operand has the words of numbers k and k + 1, output p gets the
# codes at place p of both as bfloat16, still without the factor of `FACTORS`.


def shifted(amount: int) -> str:
    """Return PTX that shifts the words to the left, or by a negative amount to the right."""
    return f"shl.b32 a, words, {amount};" if amount >= 0 else f"shr.u32 a, words, {-amount};"


def asm_of_integers(zero: int) -> str:
    """Return PTX for codes of 4 bits: as the lowest bits of 128, from which 128 + `zero` is subtracted."""
    each = "lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 ${place}, a, one, least;"
    return f"mov.b32 one, 0x3F803F80; mov.b32 least, 0x{0xC300 + zero:X}{0xC300 + zero:X};" + "".join(
        shifted(-4 * place) + each.format(place=place) for place in range(4)
    )


def asm_of_floats(num_bits: int, low: int, mask: int) -> str:
    """Return PTX for floats of `num_bits`: sign to bit 15, the others from bit `low` of bfloat16 on."""
    return "".join(
        f"{shifted(16 - num_bits * (place + 1))} and.b32 b, a, 0x80008000;"
        f"{shifted(low - num_bits * place)} lop3.b32 ${place}, a, 0x{mask:04X}{mask:04X}, b, 0xEA;"
        for place in range(16 // num_bits)
    )


# From bytes in a's halves: the low 7 bits plus 128, minus 128 or 256 as bit 7 is or is not set (or the reverse).
BYTE_NUMBER = (
    "lop3.b32 b, a, 0x00800080, 0x43004300, 0x{table:X}; lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;"
    "fma.rn.bf16x2 ${place}, b, minus, a;"
)
BYTES = "mov.b32 minus, 0xBF80BF80;"
IF_SET, IF_CLEAR = 0xEA, 0xAE


def asm_of_bytes(table: int, behind: str) -> str:
    return BYTES + "".join(
        shifted(-8 * place) + BYTE_NUMBER.format(table=table, place=place) + behind.format(place=place)
        for place in range(2)
    )


def asm_of_iq4_nl() -> str:
    """Return PTX that looks up bytes, each a number plus 128, for the codes of one word and of the other."""
    look_up = (
        "and.b32 b, a, 0x7777; prmt.b32 c, 0x3F2D1801, 0x766A5D4F, b; prmt.b32 d, 0xA6998D81, 0xF1D9C5B5, b;"
        "shr.u32 b, a, 1; lop3.b32 b, b, 0x4444, 0x3210, 0xEA; prmt.b32 {word}, c, d, b;"
    )
    return (BYTES + shifted(0) + look_up.format(word="first") + shifted(-16) + look_up.format(word="second")) + "".join(
        f"prmt.b32 a, first, second, 0x{0x4400 + 0x1111 * place:X};" + BYTE_NUMBER.format(table=IF_CLEAR, place=place)
        for place in range(4)
    )


ASSEMBLY: dict[Code, str] = {
    "uint4": asm_of_integers(0),
    "e2m1": asm_of_floats(4, 6, 0x01C0),
    "iq4_nl": asm_of_iq4_nl(),
    "int8": asm_of_bytes(IF_SET, ""),
    "uint8": "mov.b32 one, 0x3F803F80; mov.b32 least, 0x43004300;"
    + asm_of_bytes(IF_CLEAR, "fma.rn.bf16x2 ${place}, ${place}, one, least;"),
    "e4m3": asm_of_floats(8, 4, 0x07F0),
}


def assembly(weight: RepackedMatrix) -> str:
    """Return the whole PTX of a matrix's codes."""
    body = asm_of_integers(weight.zero) if weight.zero else ASSEMBLY[weight.code]
    body = body.replace("words", f"${16 // CODE_BITS[weight.code]}")
    return "{.reg .b32 a, b, c, d, one, least, minus, first, second;" + body + "}"


@triton.jit
def read(pointers, is_there, IS_WHOLE: tl.constexpr):
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=is_there, other=0)


@triton.jit
def decoded(
    words, COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    DECODE: tl.constexpr, ASSEMBLY: tl.constexpr, PLACES: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return exact numbers `[COLUMNS, BLOCK_DEPTH]`, divided by `FACTOR`, of words `[COLUMNS, 4, words of a thread]`.

    They are bfloat16, and float32 in the interpreter.
    """
    if INTERPRETED:
        codes = words.to(tl.int32)
        if PLACES == 4:
            w0 = (DECODE(codes & 15) - ZERO) / FACTOR
            w1 = (DECODE((codes >> 4) & 15) - ZERO) / FACTOR
            w2 = (DECODE((codes >> 8) & 15) - ZERO) / FACTOR
            w3 = (DECODE((codes >> 12) & 15) - ZERO) / FACTOR
        else:
            w0 = DECODE(codes & 255) / FACTOR
            w1 = DECODE((codes >> 8) & 255) / FACTOR
    elif PLACES == 4:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w0, w1 = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    if PLACES == 4:
        w0, w1 = tl.join(w0, w2), tl.join(w1, w3)
    numbers = tl.join(w0, w1).reshape([COLUMNS, 4, BLOCK_DEPTH // 8 // PLACES, 2, PLACES])
    return numbers.permute(0, 2, 4, 1, 3).reshape([COLUMNS, BLOCK_DEPTH])


@triton.jit
def of_groups(numbers, COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat `numbers [COLUMNS, GROUPS]` for each member of a group."""
    return tl.broadcast_to(numbers[:, :, None], [COLUMNS, GROUPS, BLOCK_DEPTH // GROUPS]).reshape(
        [COLUMNS, BLOCK_DEPTH]
    )


@triton.jit
def weight_block(
    weight_ptr, codes_ptr, scales_ptr, offsets_ptr, first, columns, num_columns, start, stride_group,
    dtype: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, IS_PACKED: tl.constexpr,
    DECODE: tl.constexpr, ASSEMBLY: tl.constexpr, PLACES: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    PADDED_DEPTH: tl.constexpr, GROUP: tl.constexpr, IS_NARROW: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Return numbers `[COLUMNS, BLOCK_DEPTH]` of `columns` behind column `first`, from `start` on.

    Columns from `num_columns` on repeat codes of column `first`.
    """
    is_column, known = (columns < num_columns)[:, None], first + tl.where(columns < num_columns, columns, 0)
    if IS_PACKED:
        GROUPS: tl.constexpr = max(1, BLOCK_DEPTH // GROUP)
        PER_THREAD: tl.constexpr = BLOCK_DEPTH // 4 // PLACES
        threads, words, groups = tl.arange(0, 4), tl.arange(0, PER_THREAD), tl.arange(0, GROUPS)
        places = known[:, None, None] * (PADDED_DEPTH // PLACES)
        places += threads[None, :, None] * PER_THREAD + words[None, None, :]
        codes = tl.load(codes_ptr + places + start // PLACES)
        numbers = decoded(codes, COLUMNS, BLOCK_DEPTH, DECODE, ASSEMBLY, PLACES, ZERO, FACTOR)
        group_places = first + columns[:, None] + (groups[None, :] + start // GROUP) * stride_group
        scales = tl.load(scales_ptr + group_places, mask=is_column, other=0.0)
        if IS_NARROW and not INTERPRETED:
            found = numbers * of_groups(scales.to(tl.bfloat16), COLUMNS, BLOCK_DEPTH, GROUPS)
        else:
            found = numbers.to(tl.float32) * of_groups(scales.to(tl.float32), COLUMNS, BLOCK_DEPTH, GROUPS)
            if HAS_OFFSETS:
                offsets = tl.load(offsets_ptr + group_places, mask=is_column, other=0.0)
                found += of_groups(offsets, COLUMNS, BLOCK_DEPTH, GROUPS)
            found = narrowed(found, dtype)
        if not INTERPRETED and not tl.target_info.cuda_capability_geq(9, 0):  # or `mma.sync` takes another order
            found = in_one_place(found, COLUMNS, BLOCK_DEPTH)
    else:
        depth = tl.arange(0, BLOCK_DEPTH)
        places = known[:, None] * DEPTH + depth[None, :]
        found = read(weight_ptr + places + start, (depth < DEPTH - start)[None, :], DEPTH % BLOCK_DEPTH == 0)
    return found


# Products of one kernel for plain and packed weights.


@triton.jit
def multiply_columns(
    input_ptr, weight_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr, peers_ptr, num_columns,
    stride_group, stride_out,
    TILE_ROWS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, IS_PACKED: tl.constexpr, DECODE: tl.constexpr, ASSEMBLY: tl.constexpr,
    PLACES: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr, PADDED_DEPTH: tl.constexpr, GROUP: tl.constexpr,
    IS_NARROW: tl.constexpr, HAS_OFFSETS: tl.constexpr, NUM_PARTS: tl.constexpr, PART: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns, part): sums the blocks of its part of the depth in order; the first adds the bias.

    Of several GPUs, the one that owns a row gets its sums.
    """
    part, begin, end = tl.program_id(2), 0, DEPTH
    if NUM_PARTS > 1:
        begin = part * PART
        end = tl.minimum(begin + PART, DEPTH)
    rows, depth = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_DEPTH)
    input_ptr += tl.program_id(0) * TILE_ROWS * DEPTH + rows[None, :] * DEPTH + depth[:, None]
    out_ptr += (part * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * TILE_ROWS * stride_out
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column, first = columns < num_columns, tl.full([], 0, tl.int64)
    acc = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for start in range(begin, end, BLOCK_DEPTH):
        x = read(input_ptr + start, (depth < DEPTH - start)[:, None], DEPTH % BLOCK_DEPTH == 0)
        w = weight_block(
            weight_ptr, codes_ptr, scales_ptr, offsets_ptr, first, columns, num_columns, start, stride_group, x.dtype,
            TILE_COLUMNS, DEPTH, BLOCK_DEPTH, IS_PACKED, DECODE, ASSEMBLY, PLACES, ZERO, FACTOR,
            PADDED_DEPTH, GROUP, IS_NARROW, HAS_OFFSETS,
        )  # fmt: skip
        acc = dot(w, x, acc)
    if HAS_BIAS:
        own = is_column if NUM_PARTS == 1 else is_column & (part == 0)
        acc += tl.load(bias_ptr + columns, mask=own, other=0.0).to(tl.float32)[:, None]
    out_ptr += rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
    if NUM_RANKS > 1:
        out_ptr += tl.load(peers_ptr + (tl.program_id(0) * TILE_ROWS + rows) % NUM_RANKS)[None, :]
    tl.store(out_ptr, rounded(acc, out_ptr.dtype.element_ty), mask=is_column[:, None])


def triton_linear(
    rows: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    part_depth: int | None = None,
    peers: Tensor | None = None,
) -> None:
    """Multiply in Triton, on a CPU in its interpreter; a packed weight gives the bits of the dequantized one.

    `part_depth` is the depth of a part; None: the parts share the depth. `peers [num_ranks] int64` says by how many
    numbers `out` of each GPU is away, and row r goes to that of GPU r modulo `num_ranks`.
    """
    num_columns, num_parts = weight.shape[0], len(out) if out.dim() == 3 else 1
    constants = multiply_constants(weight, bias is not None, tile_rows(rows), num_parts, part_depth)
    constants["NUM_RANKS"] = 1 if peers is None else len(peers)
    grid = len(rows) // constants["TILE_ROWS"], triton.cdiv(num_columns, constants["TILE_COLUMNS"]), num_parts
    pointers, stride = weight_arguments(weight)
    multiply_columns[grid](rows, *pointers, bias, out, peers, num_columns, stride, out.stride(-2), **constants)


def weight_arguments(weight: Weight) -> tuple[tuple[Tensor | None, ...], int]:
    """Return a plain weight, then codes, scales and offsets of a packed one, and the distance of its groups."""
    if isinstance(weight, Tensor):
        return (weight, None, None, None), 0
    assert isinstance(weight, RepackedMatrix), "weights of GPU kernels are repacked when they are loaded"
    return (None, weight.codes, weight.scales, weight.offsets), weight.scales.stride(0)


def tile_rows(rows: Tensor) -> int:
    """Return the rows per program: all rows, or as many as shared memory allows."""
    return min(len(rows), MOST_TILE_BYTES // rows.element_size())


def tile_columns(weight: Weight, num_parts: int = 1) -> int:
    """Return the columns per program, on which no bit depends."""
    if weight.dtype.itemsize > 2:
        return TILE_COLUMNS
    return MOST_TILE_COLUMNS if num_parts * weight.shape[0] >= MANY_COLUMNS else FEW_TILE_COLUMNS


def multiply_constants(
    weight: Weight, has_bias: bool, num_tile_rows: int = NUM_ROWS, num_parts: int = 1, part_depth: int | None = None
) -> dict[str, Any]:
    """Return constants, warps and stages of `multiply_columns`, for one GPU."""
    shared = triton.cdiv(triton.cdiv(weight.shape[1], BLOCK_DEPTH), num_parts) * BLOCK_DEPTH
    num_columns, is_low = tile_columns(weight, num_parts), num_tile_rows * weight.dtype.itemsize <= MOST_TILE_BYTES // 2
    return form_constants(weight) | {
        "TILE_ROWS": num_tile_rows,
        "DEPTH": weight.shape[1],
        "HAS_BIAS": has_bias,
        "TILE_COLUMNS": num_columns,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "NUM_PARTS": num_parts,
        "PART": part_depth or shared,
        "NUM_RANKS": 1,
        "num_warps": 4 if is_low or num_columns == FEW_TILE_COLUMNS else 8,  # no warp decodes what another one does
        "num_stages": 4 if is_low else 3,
    }


def form_constants(weight: Weight) -> dict[str, Any]:
    """Return the constants of a weight's form, packed or not."""
    if not isinstance(weight, RepackedMatrix):
        return PLAIN_FORM
    return {
        "IS_PACKED": True,
        "DECODE": DECODERS[weight.code],
        "ASSEMBLY": assembly(weight),
        "PLACES": 16 // CODE_BITS[weight.code],
        "ZERO": weight.zero,
        "FACTOR": FACTORS.get(weight.code, 1.0),
        "PADDED_DEPTH": weight.padded_depth,
        "GROUP": weight.padded_depth // len(weight.scales),
        "IS_NARROW": weight.is_narrow,
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
