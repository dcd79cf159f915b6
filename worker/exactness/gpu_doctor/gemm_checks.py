"""Checks of matrix products, also with quantized weights: a row has the same bits at every index of a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, LinearKernel, triton_linear
from swiftbatch.worker.kernels.cuda.gemm_probe import bits, uneven_places
from swiftbatch.worker.kernels.cuda.repacked_weights import RepackedMatrix, repacked
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, AnyLinear, Code, PackedLinear, PackedMatrix, Weight

COMPARED_COLUMNS = 1024  # a float64 reference is slow, so only these are compared
SUM_ERROR = 1e-5  # allowed error of a float32 sum, relative to the sum of absolute products


def check_gemms(parts: Parts) -> Finding:
    """Try all weight shapes with every kernel; choose one without a fault, preferably the requested one."""
    shapes = weight_shapes(parts.weights)
    kernels: list[LinearName] = ["triton"] if parts.weights.is_packed else list(LINEAR_KERNELS)
    rows: list[Row] = []
    good: list[LinearName] = []
    for kernel_name in kernels:
        kernel = LINEAR_KERNELS[kernel_name]
        tried = [_try_kernel(parts, kernel_name, kernel, name, linears) for name, linears in shapes.items()]
        rows += tried
        if all(row["differing"] == 0 and float(row["error"]) <= 1 for row in tried):
            good.append(kernel_name)
    if not good:
        words = "no kernel gives a row the same bits in all places: this device cannot keep the promise"
        return Finding(passed=False, words=words, rows=rows)
    taken = parts.kernels.linear if parts.kernels.linear in good else good[0]
    words = f"products by {taken}"
    if bad := [name for name in kernels if name not in good]:
        words += f"; not by {', '.join(bad)}, whose rows differ or whose sums are off"
    return Finding(passed=True, words=words, rows=rows, linear=taken)


def weight_shapes(weights: StackedWeights) -> dict[str, list[AnyLinear]]:
    """Return the products that all rows use, by kind and shape."""
    layers = weights.layers
    own = [layer.dense_mlp for layer in layers if layer.dense_mlp is not None]
    attention = [layer.attention for layer in layers if layer.attention is not None]
    latents = [layer.latent for layer in layers if layer.latent is not None]
    indexers = [each.indexer for each in latents if each.indexer is not None]
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    products = {
        "q, k, v": [in_front for in_front, _ in attention],
        "queries of vectors": [each.query for each in latents if each.query is not None],
        "queries of indexers": [each.query for each in indexers],
        "keys and weights of indexers": [each.narrow for each in indexers],
        "output": [behind for _, behind in attention],
        "into states": [mixer.wide for mixer in mixers],
        "of states' heads": [mixer.narrow for mixer in mixers if mixer.narrow is not None],
        "out of states": [mixer.output for mixer in mixers],
        "gate, up": [gate_up for gate_up, _ in own],
        "down": [down for _, down in own],
        "head": [weights.head],
    }
    return {
        name: [each for each in linears if each.weight.shape == linears[0].weight.shape]
        for name, linears in products.items()
        if linears
    }


def _try_kernel(parts: Parts, kernel_name: str, kernel: LinearKernel, name: str, linears: list[AnyLinear]) -> Row:
    columns, depth = linears[0].weight.shape
    out_dtype = torch.float32 if name == "head" else parts.dtype
    num_rows = parts.kernels.num_rows
    out = torch.zeros(num_rows, columns, dtype=out_dtype, device=parts.device)
    run = functools.partial(_into, kernel, out)
    seconds = _seconds(parts, run, linears, depth)
    num_bytes = sum(linear.weight.nbytes for linear in linears)
    return {
        "kernel": kernel_name,
        "weights": name,
        "depth": depth,
        "columns": columns,
        "tried": num_rows * parts.extent.num_tries,
        "differing": _num_changed_by_place(parts, kernel, linears[0], out_dtype),
        "error": _error(parts, run, linears[0], out),
        "ms": 1000 * seconds / len(linears),
        "GB/s": num_bytes / seconds / 1e9,
    }


def _into(kernel: LinearKernel, out: Tensor, rows: Tensor, linear: AnyLinear) -> None:
    kernel(rows, linear.weight, linear.bias, out)


def _num_changed_by_place(parts: Parts, kernel: LinearKernel, linear: AnyLinear, out_dtype: torch.dtype) -> int:
    """Return how often one row's bits change when its index and the other rows change."""
    given = (kernel, linear, [parts.kernels.num_rows], parts.dtype, out_dtype)
    return sum(len(uneven_places(*given, seed)) for seed in range(parts.extent.num_tries))


def _error(parts: Parts, run: functools.partial[None], linear: AnyLinear, out: Tensor) -> float:
    """Return the greatest error of some columns relative to the allowed one; 1 is the limit."""
    rows = random_rows(parts, linear.weight.shape[1], parts.generator(2))
    run(rows, linear)
    weight = first_columns(linear.weight).double()
    bias = 0.0 if linear.bias is None else linear.bias[:COMPARED_COLUMNS].double()
    exact = rows.double() @ weight.t() + bias
    allowed = torch.finfo(out.dtype).eps * exact.abs() + SUM_ERROR * (rows.double().abs() @ weight.abs().t())
    ratio = (out[:, : len(weight)].double() - exact).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    return float(ratio.nan_to_num(torch.inf).max())


def first_columns(weight: Weight) -> Tensor:
    chosen = slice(COMPARED_COLUMNS)
    return weight.rows(chosen).dequantized() if isinstance(weight, PackedMatrix) else weight[chosen]


def _seconds(parts: Parts, run: functools.partial[None], linears: Sequence[AnyLinear], depth: int) -> float:
    """Time the products in turn, so that weights come from memory, not a cache."""
    rows = random_rows(parts, depth, parts.generator(3))

    def work() -> None:
        for linear in linears:
            run(rows, linear)

    return parts.seconds(work)


def random_rows(parts: Parts, depth: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(parts.kernels.num_rows, depth, generator=generator, device=parts.device)
    return rows.to(parts.dtype)


# Check of products with packed weights: the same bits as the plain kernel with dequantized ones.


FORMS: tuple[tuple[Code, int, float, torch.dtype], ...] = (  # code, group (0: the whole depth), offset in scales, scale
    ("uint4", 128, -8, torch.bfloat16),
    ("uint4", 128, -7, torch.half),
    ("e2m1", 32, 0, torch.bfloat16),
    ("e2m1", 16, 0, torch.half),
    ("iq4_nl", 32, 0, torch.half),
    ("e4m3", 128, 0, torch.half),
    ("int8", 0, 0, torch.half),
    ("uint8", 32, -7, torch.half),
)
MOST_COLUMNS = 16_384
TIMED_SHARE = 16  # timed bytes are divided by it, because matrices are read in turn


def check_packed_gemms(parts: Parts) -> Finding:
    """Check all packed weight shapes of the model, or all codes in its shapes."""
    if parts.dtype != torch.bfloat16:
        words = "not tried: packed weights are multiplied in bfloat16, and are dequantized for float32"
        return Finding(passed=True, words=words, rows=[])
    own = dict(_own_matrices(parts))
    rows = [
        try_packed_kernel(parts, name, matrices) for name, matrices in (own.items() if own else _random_matrices(parts))
    ]
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
    shapes = [linears[0].weight.shape for linears in weight_shapes(parts.weights).values()]
    widest = {depth: columns for columns, depth in sorted(shapes)}
    for depth, columns in widest.items():
        for code, group, offset, dtype in FORMS:
            if depth % (group or depth) == 0:
                shape = (min(columns, MOST_COLUMNS), depth)
                matrix = random_matrix(parts, code, shape, group or depth, offset, dtype)
                yield f"random {code}", copies(parts, matrix)


def random_matrix(
    parts: Parts, code: Code, shape: tuple[int, int], group: int, offset: float, dtype: torch.dtype
) -> RepackedMatrix:
    """Return a matrix of random codes without NaN, whose scales are of `dtype`; offsets are scales times `offset`."""
    columns, depth = shape
    generator, device = parts.generator(6), parts.device
    width = depth * CODE_BITS[code] // 8
    codes = torch.randint(0, 256, (columns, width), generator=generator, device=device, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 0  # e4m3 has NaN at these codes
    scales = torch.rand(columns, depth // group, generator=generator, device=device).to(dtype).float()
    return repacked(PackedMatrix(code, codes, scales, parts.dtype, offset * scales if offset else None))


def copies(parts: Parts, matrix: RepackedMatrix) -> list[PackedMatrix]:
    number = parts.extent.read_bytes // TIMED_SHARE // matrix.nbytes
    return [matrix, *(replace(matrix, codes=matrix.codes.clone()) for _ in range(number))]


def try_packed_kernel(parts: Parts, name: str, matrices: list[PackedMatrix]) -> Row:
    columns, depth = matrices[0].shape
    num_rows = parts.kernels.num_rows
    out = torch.zeros(num_rows, columns, device=parts.device)
    run = functools.partial(_into, triton_linear, out)
    seconds = _seconds(parts, run, [PackedLinear(each) for each in matrices], depth)
    return {
        "weights": name,
        "group": matrices[0].group_size,
        "depth": depth,
        "columns": columns,
        "tried": num_rows * parts.extent.num_tries,
        "differing": _num_unlike_plain(parts, matrices[0], out),
        "ms": 1000 * seconds / len(matrices),
        "GB/s": sum(each.nbytes for each in matrices) / seconds / 1e9,
    }


def _num_unlike_plain(parts: Parts, matrix: PackedMatrix, out: Tensor) -> int:
    """Return how many rows differ from the plain kernel with dequantized weights."""
    generator, plain = parts.generator(7), first_columns(matrix)
    expected = torch.zeros(len(out), len(plain), device=parts.device)
    differing = torch.zeros((), dtype=torch.int64, device=parts.device)
    for _ in range(parts.extent.num_tries):
        rows = random_rows(parts, matrix.shape[1], generator)
        triton_linear(rows, matrix, None, out)
        triton_linear(rows, plain, None, expected)
        differing += (bits(out[:, : len(plain)].contiguous()) != bits(expected)).any(1).sum()
    return int(differing)
