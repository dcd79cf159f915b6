"""Triton kernels that store, load, move, copy and average keys and values, including those in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.cuda.gemm import e4m3, signed_byte
from swiftbatch.worker.kernels.cuda.triton_primitives import INTERPRETED, in_one_place, narrowed, rounded
from swiftbatch.worker.kernels.kv_codes import LARGEST, cuda_row_width

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a number to an integer in the low bits
MOST_INT8, MOST_E4M3 = (tl.constexpr(each) for each in LARGEST.values())
MOST_FLOAT = tl.constexpr(3.4e38)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_rows(pointers, seen, columns, NUM_COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Load rows, with unseen rows and padding columns masked. Without `MASKED` there are none to mask."""
    if MASKED:
        return tl.load(pointers, mask=seen[:, None] & (columns < NUM_COLUMNS)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def in_pool(entries, pages_ptr, mask, PAGE: tl.constexpr):
    """Return a slot's entries as int64. With pages, return their indices in the pool."""
    if PAGE:
        numbers = entries.to(tl.uint32)  # unsigned, so that dividing by a power of two is a shift
        pages = tl.load(pages_ptr + numbers // PAGE, mask=mask, other=0)
        return (pages * PAGE + (numbers % PAGE).to(tl.int32)).to(tl.int64)
    return entries.to(tl.int64)


@triton.jit
def scale_pointers(rows, HEAD_DIM: tl.constexpr):
    return (rows + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_kept(rows, seen, columns, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr):
    """Load columns of rows that start at `rows [num_rows, 1]`, decoded to a dtype."""
    kept: tl.constexpr = rows.dtype.element_ty
    if kept != tl.int8 and kept != tl.uint8:
        return load_rows(rows + columns[None, :], seen, columns, HEAD_DIM, MASKED)
    scales = load_rows(scale_pointers(rows, HEAD_DIM), seen, tl.arange(0, 1), 1, MASKED)
    codes = load_rows(rows + columns[None, :], seen, columns, HEAD_DIM, MASKED).to(tl.int32) & 0xFF
    numbers = signed_byte(codes) if kept == tl.int8 else e4m3(codes)
    return narrowed(in_one_place(numbers * scales, codes.shape[0], codes.shape[1]), dtype)


# Four codes become two pairs of bfloat16, exactly. A signed byte is 128 plus its low seven bits, less 128, or less 256
# if its highest bit is set. An E4M3 code's bits move to their places, and 2^120 corrects the exponent's bias.
INT8_PAIRS = tl.constexpr("""
{
.reg .b32 low, high, size, sign, one;
mov.b32 one, 0x3F803F80;
prmt.b32 low, $2, 0, 0x4140;
prmt.b32 high, $2, 0, 0x4342;
lop3.b32 size, low, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, low, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $0, size, one, sign;
lop3.b32 size, high, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, high, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $1, size, one, sign;
}
""")
E4M3_PAIRS = tl.constexpr("""
{
.reg .b32 low, high, size, moved, power, zero;
mov.b32 power, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.u32 size, low, 4;
and.b32 size, size, 0x07F007F0;
lop3.b32 moved, low, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $0, moved, power, zero;
shr.u32 size, high, 4;
and.b32 size, size, 0x07F007F0;
lop3.b32 moved, high, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $1, moved, power, zero;
}
""")


@triton.jit
def load_codes(rows, seen, columns, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr):
    """Load columns of rows that start at `rows [num_rows, 1]` as exact numbers of a dtype, without their scales."""
    codes = load_rows(rows + columns[None, :], seen, columns, HEAD_DIM, MASKED)
    code: tl.constexpr = codes.dtype
    if code != tl.int8 and code != tl.uint8:
        return codes
    if INTERPRETED or dtype == tl.float32:
        codes = codes.to(tl.int32) & 0xFF
        numbers = signed_byte(codes) if code == tl.int8 else e4m3(codes)
    else:
        pairs: tl.constexpr = INT8_PAIRS if code == tl.int8 else E4M3_PAIRS
        numbers = tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    return in_one_place(numbers, codes.shape[0], codes.shape[1]).to(dtype)


@triton.jit
def load_scales(rows, seen, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales of rows of codes, `[num_rows]` float32; rows of numbers have the scale 1."""
    scales = tl.full([rows.shape[0]], 1.0, tl.float32)
    if rows.dtype.element_ty == tl.int8 or rows.dtype.element_ty == tl.uint8:
        found = load_rows(scale_pointers(rows, HEAD_DIM), seen, tl.arange(0, 1), 1, MASKED)
        scales = tl.sum(found, 1)
    return scales


@triton.jit
def int8_code(part):
    """Return an int whose low byte is the code: the number rounded half to even."""
    part = tl.minimum(tl.maximum(part, -MOST_INT8), MOST_INT8)
    return (part + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def e4m3_code(part):
    """Return an int whose low byte is the code. Subnormal codes are supported."""
    bits = part.to(tl.int32, bitcast=True)
    size = bits & SIZE_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (size.to(tl.float32, bitcast=True) * 512.0 + ROUNDER).to(tl.int32, bitcast=True) & 0xFF
    code = tl.minimum(tl.where(size < (121 << 23), small, normal), 0x7E)
    return ((bits >> 24) & 0x80) | code


@triton.jit
def store_halves(pointers, first, second, mask, HEAD_DIM: tl.constexpr):
    tl.store(pointers, first, mask=mask)
    tl.store(pointers + HEAD_DIM // 2, second, mask=mask)


@triton.jit
def size_bits(part):
    return part.to(tl.int32, bitcast=True) & SIZE_BITS


@triton.jit
def scales_of(most, mask, code: tl.constexpr):
    """Return scales of rows by the bits of their largest sizes."""
    largest = tl.max(tl.where(mask, most, 0), 1).to(tl.float32, bitcast=True)
    return tl.math.div_rn(largest, tl.full(largest.shape, MOST_INT8 if code == tl.int8 else MOST_E4M3, tl.float32))


@triton.jit
def codes_of(part, scales, code: tl.constexpr):
    """Return codes of rows; those with non-finite numbers decode to non-finite numbers."""
    is_usable = (scales > 0.0) & (scales <= MOST_FLOAT)
    divisors = tl.broadcast_to(tl.where(is_usable, scales, 1.0)[:, None], part.shape)
    part = tl.math.div_rn(tl.where(is_usable[:, None], part, 0.0), divisors)
    codes = int8_code(part) if code == tl.int8 else e4m3_code(part)
    return codes.to(code)


@triton.jit
def store_kept(rows, first, second, columns, mask, HEAD_DIM: tl.constexpr):
    """Store heads, given as two float32 halves `[heads, columns]`, as rows that start at `rows [heads, 1]`."""
    code: tl.constexpr = rows.dtype.element_ty
    if code == tl.int8 or code == tl.uint8:
        scales = scales_of(tl.maximum(size_bits(first), size_bits(second)), mask, code)
        store_halves(rows + columns, codes_of(first, scales, code), codes_of(second, scales, code), mask, HEAD_DIM)
        tl.store(scale_pointers(rows, HEAD_DIM), scales[:, None], mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0)
    else:
        store_halves(rows + columns, first, second, mask, HEAD_DIM)


@triton.jit
def store_stripe(rows, numbers, columns, mask, WIDTH: tl.constexpr):
    """Store float32 `numbers [heads, columns]` as rows that start at `rows [heads, 1]`."""
    code: tl.constexpr = rows.dtype.element_ty
    if code == tl.int8 or code == tl.uint8:
        scales = scales_of(size_bits(numbers), mask, code)
        tl.store(rows + columns, codes_of(numbers, scales, code), mask=mask)
        tl.store(scale_pointers(rows, WIDTH), scales[:, None], mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0)
    else:
        tl.store(rows + columns, numbers, mask=mask)


# Rows of keys and values that are moved or copied, in all layers at once.


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by a number's size in bytes
MOVE_WARPS = 1  # one warp, because the thread that reads a number must also write it
PADDING = (-1, -1, -1)
Move = tuple[int, int, int]
"""Slot, source and target of a row."""
NUM_ROWS = 32
COPY_WARPS = 4


def expect_arena(arena: torch.Tensor) -> None:
    """Raise ValueError unless it is a contiguous `[num_layers, num_parts, num_slots, num_kv_heads, capacity,
    head_dim]`.
    """
    if (
        arena.dim() != 6
        or arena.shape[1] not in (1, 2)
        or not arena.is_contiguous()
        or arena.element_size() not in BITS
    ):
        raise ValueError(
            f"arena: found {arena.dtype} {list(arena.shape)} with strides {list(arena.stride())}, expected "
            "[num_layers, 1 or 2, num_slots, num_kv_heads, capacity, head_dim] side by side, of 1, 2 or 4 bytes each"
        )


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of the bits as integers, so that copies keep the bits of NaN."""
    return rows.view(BITS[rows.element_size()])


@triton.jit
def move_slot_rows(
    arena_ptr, moves_ptr, num_moves, num_slots, num_heads, capacity, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Make all moves of one slot, in order, in one layer, part and head."""
    part, slot = tl.program_id(0) // num_heads, tl.program_id(1)
    place = (part.to(tl.int64) * num_slots + slot) * num_heads + tl.program_id(0) % num_heads
    rows_ptr = arena_ptr + place * capacity * HEAD_DIM
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    for i in range(0, num_moves):
        if tl.load(moves_ptr + 3 * i) == slot:
            source, target = tl.load(moves_ptr + 3 * i + 1), tl.load(moves_ptr + 3 * i + 2)
            row = tl.load(rows_ptr + source.to(tl.int64) * HEAD_DIM + columns, mask=inside)
            tl.debug_barrier()
            tl.store(rows_ptr + target.to(tl.int64) * HEAD_DIM + columns, row, mask=inside)
            tl.debug_barrier()


def moves_of(slot: int, root: int, path: Many[int]) -> list[Move]:
    """Return the moves that bring the accepted nodes `path` directly behind entry `root`.

    Raises ValueError unless the path's nodes increase.
    """
    moves, before = list[Move](), -1
    for i, node in enumerate(path):
        if node <= before:
            raise ValueError(f"found a path of nodes {list(path)}, expected them to increase")
        if node != i:
            moves.append((slot, root + 1 + node, root + 1 + i))
        before = node
    return moves


def move_rows(arena: torch.Tensor, moves: torch.Tensor) -> None:
    """Move rows of `arena [num_layers, num_parts, num_slots, num_kv_heads, capacity, head_dim]` in one launch.

    `moves [num_moves, 3] int32` on the device (unchecked): slot (-1: padding), source and target. Raises ValueError for
    shapes that do not match.
    """
    expect_arena(arena)
    if moves.dim() != 2 or moves.shape[1] != 3 or moves.dtype != torch.int32 or not moves.is_contiguous():
        raise ValueError(f"moves: found {moves.dtype} {list(moves.shape)}, expected torch.int32 [num_moves, 3]")
    num_layers, num_parts, num_slots, num_heads, capacity, head_dim = arena.shape
    move_slot_rows[(num_layers * num_parts * num_heads, num_slots)](
        bits_of(arena),
        moves,
        len(moves),
        num_slots,
        num_heads,
        capacity,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        num_warps=MOVE_WARPS,
    )


@triton.jit(do_not_specialize=["first", "count"])  # one kernel for all values
def copy_rows(
    source_ptr, entries_ptr, pages_ptr, out_ptr, first, count, num_parts, num_heads,
    stride_source_layer, stride_source_part, stride_source_head, stride_source_row,
    stride_layer, stride_part, stride_head, stride_row,
    NUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CHOSEN: tl.constexpr,
    IS_CODED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Copy rows `entries [num_layers, num_heads, count]`, or those from `first` on."""
    place, head = tl.program_id(0) // num_heads, (tl.program_id(0) % num_heads).to(tl.int64)
    layer, part = (place // num_parts).to(tl.int64), (place % num_parts).to(tl.int64)
    rows = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    if IS_CHOSEN:
        entries = tl.load(entries_ptr + (layer * num_heads + head) * count + rows, mask=rows < count, other=-1)
    else:
        entries = first + rows
    columns = tl.arange(0, WIDTH)
    is_row = (rows < count) & (entries >= 0)
    inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    source_ptr += layer * stride_source_layer + part * stride_source_part + head * stride_source_head
    out_ptr += layer * stride_layer + part * stride_part + head * stride_head
    source = in_pool(entries, pages_ptr, is_row, PAGE) * stride_source_row
    target = rows.to(tl.int64) * stride_row
    if IS_CODED:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        numbers = load_kept(source_ptr + source[:, None], is_row, columns, HEAD_DIM, True, dtype)
    else:
        numbers = tl.load(source_ptr + source[:, None] + columns[None, :], mask=inside)
    tl.store(out_ptr + target[:, None] + columns[None, :], numbers, mask=inside)


def gather_entries(
    source: torch.Tensor, entries: torch.Tensor, out: torch.Tensor, pages: PageTable | None = None
) -> None:
    """Copy chosen rows of `source [num_layers, num_parts, num_kv_heads, capacity, row_width]` in one launch.

    They go to `out [num_layers, num_parts, num_kv_heads, count, head_dim]`; `entries [num_layers, num_kv_heads, count]
    int32` (unchecked) are per head, and -1 leaves a row of `out` unchanged. With `pages`, `entries` are those of a slot
    whose pages are in the pool `source`. Raises ValueError for shapes that do not match.
    """
    expected = (out.shape[0], out.shape[2], out.shape[-2])
    if tuple(entries.shape) != expected or entries.dtype != torch.int32 or not entries.is_contiguous():
        raise ValueError(f"entries: found {entries.dtype} {list(entries.shape)}, expected torch.int32 {list(expected)}")
    _launch(source, entries, 0, out, pages)


def gather_range(source: torch.Tensor, first: int, out: torch.Tensor, pages: PageTable | None = None) -> None:
    """Copy consecutive rows from `first` on, as `gather_entries` does.

    Raises ValueError also for rows that do not exist.
    """
    capacity = source.shape[-2] if pages is None else pages.capacity
    if not 0 <= first <= capacity - out.shape[-2]:
        end = first + out.shape[-2]
        raise ValueError(f"found rows {first} to {end}, expected them within 0 to {capacity}")
    _launch(source, None, first, out, pages)


def _launch(
    source: torch.Tensor, entries: torch.Tensor | None, first: int, out: torch.Tensor, pages: PageTable | None
) -> None:
    num_layers, num_parts, num_heads, _, width = source.shape
    count, head_dim = out.shape[-2:]
    fits = tuple(out.shape[:3]) == (num_layers, num_parts, num_heads)
    fits = fits and width == cuda_row_width(source.dtype, out.dtype, head_dim)
    if not fits or out.stride(-1) != 1 or source.stride(-1) != 1:
        raise ValueError(
            f"out: found {out.dtype} {list(out.shape)} for rows of {source.dtype} {list(source.shape)}, expected each "
            "row's numbers side by side"
        )
    is_coded = source.dtype != out.dtype
    if count == 0:
        return
    copy_rows[(num_layers * num_parts * num_heads, triton.cdiv(count, NUM_ROWS))](
        source if is_coded else bits_of(source),
        entries,
        None if pages is None else pages.numbers,
        out if is_coded else bits_of(out),
        first,
        count,
        num_parts,
        num_heads,
        *source.stride()[:4],
        *out.stride()[:4],
        NUM_ROWS=NUM_ROWS,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        IS_CHOSEN=entries is not None,
        IS_CODED=is_coded,
        PAGE=0 if pages is None else pages.page,
        num_warps=COPY_WARPS,
    )


# Means of chunks of keys or values, in all layers at once.


NUM_WARPS = 4


@triton.jit(do_not_specialize=["first"])  # one kernel for all values
def average_chunk(
    source_ptr, pages_ptr, out_ptr, first, chunk_size, num_heads,
    stride_source_layer, stride_source_head, stride_source_row, stride_layer, stride_head, stride_row,
    CHUNK_WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (layer and head, chunk): sums the chunk's rows in float32, and rounds their mean once."""
    layer, head = (tl.program_id(0) // num_heads).to(tl.int64), (tl.program_id(0) % num_heads).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    inside, columns = tl.arange(0, CHUNK_WIDTH), tl.arange(0, WIDTH)
    entries = first + chunk * chunk_size + inside
    rows = in_pool(entries, pages_ptr, inside < chunk_size, PAGE) * stride_source_row
    source_ptr += layer * stride_source_layer + head * stride_source_head
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers = load_kept(source_ptr + rows[:, None], inside < chunk_size, columns, HEAD_DIM, True, dtype).to(tl.float32)
    mean = rounded(tl.sum(numbers, 0) / chunk_size, dtype)
    out_ptr += layer * stride_layer + head * stride_head + chunk * stride_row
    tl.store(out_ptr + columns, mean, mask=columns < HEAD_DIM)


def average_chunks(
    source: torch.Tensor, first: int, chunk_size: int, out: torch.Tensor, pages: PageTable | None = None
) -> None:
    """Average `chunk_size` rows each, from row `first` of `source [num_layers, num_kv_heads, capacity, row_width]` on.

    The means go to `out [num_layers, num_kv_heads, num_chunks, head_dim]` in one launch. With `pages`, the rows are
    those of a slot whose pages are in the pool `source`. Raises ValueError for shapes that do not match, and for
    missing rows.
    """
    num_layers, num_heads, capacity, width = source.shape
    capacity = capacity if pages is None else pages.capacity
    num_chunks, head_dim = out.shape[2:]
    expected = (num_layers, num_heads, num_chunks, head_dim)
    fits = tuple(out.shape) == expected and width == cuda_row_width(source.dtype, out.dtype, head_dim)
    if not fits or out.stride(-1) != 1 or source.stride(-1) != 1:
        raise ValueError(
            f"out: found {out.dtype} {list(out.shape)}, expected {list(expected)} of what rows of {source.dtype} "
            f"{list(source.shape)} stand for"
        )
    end = first + num_chunks * chunk_size
    if not 0 <= first <= end <= capacity:
        raise ValueError(f"found rows {first} to {end}, expected them within 0 to {capacity}")
    average_chunk[(num_layers * num_heads, num_chunks)](
        source,
        None if pages is None else pages.numbers,
        out,
        first,
        chunk_size,
        num_heads,
        *source.stride()[:3],
        *out.stride()[:3],
        CHUNK_WIDTH=triton.next_power_of_2(chunk_size),
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        PAGE=0 if pages is None else pages.page,
        num_warps=NUM_WARPS,
    )
