"""The check of products with packed weights: the bits of the plain kernel's over the numbers that they stand for.

A model without packed weights lends its shapes: random codes of every kind are tried in them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from swiftbatch.worker.exactness.gpu_doctor.check_parts import Parts
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.product_check import bits, first_columns, random_rows, weight_shapes
from swiftbatch.worker.kernels.cuda.linear import triton_linear
from swiftbatch.worker.kernels.cuda.packed_linear import packed_linear
from swiftbatch.worker.kernels.packed_weights import CODE_BITS, Code, PackedMatrix

FORMS: tuple[tuple[Code, int, bool], ...] = (  # code, group (0: the whole depth), offsets
    ("uint4", 128, True),
    ("e2m1", 16, False),
    ("iq4_nl", 32, False),
    ("e4m3", 128, False),
    ("int8", 0, False),
    ("uint8", 32, True),
)
MOST_COLUMNS = 16_384  # of a matrix of random codes
TIMED_SHARE = 16  # of what reading is timed by, for matrices one after the other: no cache holds them


def check_packed_products(parts: Parts) -> Finding:
    """All packed weight shapes of the model, or all codes in its shapes."""
    if parts.dtype != torch.bfloat16:
        words = "not tried: packed weights are multiplied in bfloat16, and are dequantized for float32"
        return Finding(passed=True, words=words, rows=[])
    own = dict(_own_matrices(parts))
    rows = [_tried(parts, name, matrices) for name, matrices in (own.items() if own else _random_matrices(parts))]
    differing, tried = (sum(int(row[name]) for row in rows) for name in ("differing", "tried"))
    words = f"{differing_bits(differing, tried, 'rows')} from those of dequantized weights"
    unproved = "products with packed weights, which differ here" if differing and not own else None
    return Finding(passed=not (own and differing), words=words, rows=rows, unproved=unproved)


def _own_matrices(parts: Parts) -> Iterator[tuple[str, list[PackedMatrix]]]:
    for name, linears in weight_shapes(parts.weights).items():
        packed = [linear.weight for linear in linears if isinstance(linear.weight, PackedMatrix)]
        for form in sorted({each.form[:3] for each in packed}):
            yield f"{name}, {form[0]}", [each for each in packed if each.form[:3] == form]


def _random_matrices(parts: Parts) -> Iterator[tuple[str, list[PackedMatrix]]]:
    """Yield random matrices for every depth of the model, one form after the other."""
    shapes = [linears[0].weight.shape for linears in weight_shapes(parts.weights).values()]
    widest = {depth: columns for columns, depth in sorted(shapes)}
    for depth, columns in widest.items():
        for code, group, has_offsets in FORMS:
            if depth % (group or depth) == 0:
                shape = (min(columns, MOST_COLUMNS), depth)
                yield f"random {code}", _copies(parts, random_matrix(parts, code, shape, group or depth, has_offsets))


def random_matrix(parts: Parts, code: Code, shape: tuple[int, int], group: int, has_offsets: bool) -> PackedMatrix:
    """Make a matrix of random codes, all of them numbers."""
    columns, depth = shape
    generator, device = parts.generator(6), parts.device
    width = depth * CODE_BITS[code] // 8
    codes = torch.randint(0, 256, (columns, width), generator=generator, device=device, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 0  # which are no numbers
    scales = torch.rand(columns, depth // group, generator=generator, device=device).half().float()
    return PackedMatrix(code, codes, scales, parts.dtype, -8 * scales if has_offsets else None)


def _copies(parts: Parts, matrix: PackedMatrix) -> list[PackedMatrix]:
    """The matrix several times."""
    number = parts.extent.read_bytes // TIMED_SHARE // matrix.nbytes
    every = torch.arange(matrix.shape[0], device=matrix.device)
    return [matrix, *(matrix.rows(every) for _ in range(number))]


def _tried(parts: Parts, name: str, matrices: list[PackedMatrix]) -> Row:
    columns, depth = matrices[0].shape
    num_rows = parts.kernels.num_rows
    out = torch.zeros(num_rows, columns, device=parts.device)
    rows = random_rows(parts, depth, parts.generator(3))
    seconds = parts.seconds(functools.partial(_multiply_all, rows, matrices, out))
    return {
        "weights": name,
        "group": matrices[0].group_size,
        "depth": depth,
        "columns": columns,
        "tried": num_rows * parts.extent.num_tries,
        "differing": _num_differing(parts, matrices[0], out),
        "ms": 1000 * seconds / len(matrices),
        "GB/s": sum(each.nbytes for each in matrices) / seconds / 1e9,
    }


def _multiply_all(rows: Tensor, matrices: list[PackedMatrix], out: Tensor) -> None:
    for matrix in matrices:
        packed_linear(rows, matrix, None, out)


def _num_differing(parts: Parts, matrix: PackedMatrix, out: Tensor) -> int:
    """Count rows of which some number differs from the plain kernel's over the same columns, dequantized."""
    generator, plain = parts.generator(7), first_columns(matrix)
    expected = torch.zeros(len(out), len(plain), device=parts.device)
    differing = torch.zeros((), dtype=torch.int64, device=parts.device)
    for _ in range(parts.extent.num_tries):
        rows = random_rows(parts, matrix.shape[1], generator)
        packed_linear(rows, matrix, None, out)
        triton_linear(rows, plain, None, expected)
        differing += (bits(out[:, : len(plain)].contiguous()) != bits(expected)).any(1).sum()
    return int(differing)
