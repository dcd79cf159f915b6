"""The timed operations (matrices, attention, walks, forwards) with their bytes and multiplications."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, tree_rows
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team
from swiftbatch.worker.kernels.native_weights import ELEMENTS, quantized_rows
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedMatrix
from swiftbatch.worker.kernels.row_tables import address_of
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling import native_sampler as sampling
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

LARGEST, SMALLEST = 1 << 28, 1 << 18  # bytes: beyond every cache, within all caches
NUM_READ = 1 << 26  # least bytes per reading
NUM_MULTIPLIED = 200_000  # all registers, per round
NUM_ROUNDS = 20  # short ones, so that some are undisturbed
FLOATS = 64  # read at a time
POINTER, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES = {
    "roof_read": (None, [POINTER, ctypes.c_int64, ctypes.c_int64]),
    "roof_multiply": (ctypes.c_double, [INT, ctypes.c_int64]),
    "roof_matrix_new": (POINTER, [INT, INT, INT, POINTER]),
    "roof_matrix_quantized": (POINTER, [INT, INT, INT, POINTER]),
    "roof_matrix_free": (None, [POINTER]),
    "roof_linear": (None, [POINTER, POINTER, INT, POINTER, POINTER]),
}


def with_roof(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Roof:
    """Measures the machine's limits once; the best of some rounds."""

    def __init__(self, library: ctypes.CDLL, element: int, num_threads: int) -> None:
        self._library = with_roof(library)
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._memory = np.ones(LARGEST // 4, dtype=np.float32)
        self._bytes_per_second: dict[int, float] = {}
        self.flops_per_second = self._multiply(element)

    def bytes_per_second(self, num_bytes: int) -> float:
        """Measure reading so many bytes repeatedly on all threads."""
        size = min(max(1 << (num_bytes - 1).bit_length(), SMALLEST), LARGEST)
        if size not in self._bytes_per_second:
            self._bytes_per_second[size] = self._read(size)
        return self._bytes_per_second[size]

    def seconds(self, num_bytes: int, num_flops: int, num_bytes_between: int) -> float:
        """Return the least time for these bytes and operations."""
        return max(num_bytes / self.bytes_per_second(num_bytes_between), num_flops / self.flops_per_second)

    def _read(self, size: int) -> float:
        count = size // 4 // self._num_threads // FLOATS * FLOATS
        repeats = max(1, NUM_READ // size)
        start = address_of(self._memory) or 0

        def read(thread: int) -> None:
            self._library.roof_read(start + thread * count * 4, count, repeats)

        return count * 4 * self._num_threads * repeats / self._best_seconds(read)

    def _multiply(self, element: int) -> float:
        num_flops = self._library.roof_multiply(element, 1) * NUM_MULTIPLIED * self._num_threads
        return float(num_flops / self._best_seconds(lambda _: self._library.roof_multiply(element, NUM_MULTIPLIED)))

    def _best_seconds(self, work: Callable[[int], None]) -> float:
        """Return the seconds of the best round with all threads."""
        rounds = []
        for _ in range(NUM_ROUNDS):
            started = time.perf_counter()
            list(self._pool.map(work, range(self._num_threads)))
            rounds.append(time.perf_counter() - started)
        return min(rounds)


SAMPLING = SamplingParams(max_tokens=1000, temperature=1.0, min_p=0.1, seed=1, ignore_eos=True)


@dataclass(frozen=True)
class Packing:
    """A packing of a matrix, as in Q4_1, int4 checkpoints and Q8_0."""

    name: str
    code: Code
    group_size: int
    has_offsets: bool
    as_integers: bool = False  # rows are rounded to 8 bits: --linear int8


PACKINGS = (
    Packing("4 bits by 32", "uint4", 32, has_offsets=True),
    Packing("4 bits by 32, int8", "uint4", 32, has_offsets=True, as_integers=True),
    Packing("4 bits by 128", "uint4", 128, has_offsets=False),
    Packing("8 bits by 32", "int8", 32, has_offsets=False),
    Packing("8 bits by 32, int8", "int8", 32, has_offsets=False, as_integers=True),
)


@dataclass(frozen=True)
class Operation:
    """A call over rows; `num_bytes_between` are read between two uses."""

    name: str
    num_rows: int
    num_bytes: int
    num_flops: int
    num_bytes_between: int
    call: Callable[[], object]
    length: int | None = None  # positions in the cache
    in_torch: Callable[[], object] | None = None  # the same in `transformers`
    whole: str | None = None  # the whole model in this form, of which a forward has this part `times`
    times: int = 1


def matrix_shapes(sizes: DecoderSizes) -> dict[str, tuple[int, int]]:
    """Return depth and columns of a layer's matrices and the head's."""
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "q, k, v": (sizes.hidden, query + 2 * key),
        "output": (query, sizes.hidden),
        "gate, up": (sizes.hidden, (1 + sizes.has_gates) * sizes.intermediate),
        "down": (sizes.intermediate, sizes.hidden),
        "head": (sizes.hidden, -(-sizes.vocab // LANES) * LANES),
    }


class Matrix:
    """A linear layer of zeros."""

    def __init__(self, team: Team, handle: int, num_bytes: int, depth: int, columns: int) -> None:
        self._team, self._handle, self._num_bytes = team, handle, num_bytes
        self._depth, self._columns = depth, columns
        weakref.finalize(self, team.library.roof_matrix_free, handle)

    @classmethod
    def plain(cls, team: Team, dtype: torch.dtype, depth: int, columns: int) -> Matrix:
        weight = torch.zeros(columns, depth, dtype=dtype)
        handle = team.library.roof_matrix_new(ELEMENTS[dtype], depth, columns, weight.data_ptr())
        return cls(team, handle, weight.nbytes, depth, columns)

    @classmethod
    def packed(cls, team: Team, dtype: torch.dtype, depth: int, columns: int, packing: Packing) -> Matrix:
        codes = torch.zeros(columns, depth * CODE_BITS[packing.code] // 8, dtype=torch.uint8)
        scales = torch.ones(columns, depth // packing.group_size)
        offsets = scales if packing.has_offsets else None
        rows = quantized_rows(PackedMatrix(packing.code, codes, scales, dtype, offsets), packing.as_integers)
        assert rows is not None
        handle = team.library.roof_matrix_quantized(ELEMENTS[dtype], depth, columns, rows.address)
        return cls(team, handle, rows.num_bytes, depth, columns)

    def operation(self, name: str, num_rows: int, whole: str, times: int) -> Operation:
        rows = np.ones((num_rows, self._depth), dtype=np.float32)
        out = np.empty((num_rows, self._columns), dtype=np.float32)

        def multiply() -> None:
            self._team.library.roof_linear(self._team.handle, self._handle, num_rows, address_of(rows), address_of(out))

        num_flops = 2 * num_rows * self._depth * self._columns
        num_bytes = self._num_bytes
        return Operation(name, num_rows, num_bytes, num_flops, num_bytes, multiply, whole=whole, times=times)


def matrix_operations(
    sizes: DecoderSizes, team: Team, row_counts: tuple[int, ...], of: str = ""
) -> Iterator[Operation]:
    """Yield a layer's matrices and the head, in the model's dtype and packed."""
    for name, (depth, columns) in matrix_shapes(sizes).items():
        times = 1 if name == "head" else sizes.num_layers
        matrices = {"": Matrix.plain(team, sizes.dtype, depth, columns)}
        for packing in PACKINGS:
            if depth % packing.group_size == 0:
                matrices[f" {packing.name}"] = Matrix.packed(team, sizes.dtype, depth, columns, packing)
        for (form, matrix), num_rows in itertools.product(matrices.items(), row_counts):
            shown = f"{of}{name} {depth}x{columns}{form}"
            yield matrix.operation(shown, num_rows, f"{of}all matrices{form}", times)


def attention_operation(sizes: DecoderSizes, team: Team, cache: FullKVCache, num_rows: int) -> Operation:
    rows, layers = rows_behind(cache, num_rows), itertools.cycle(range(sizes.num_layers))
    query = torch.ones(num_rows, sizes.num_heads, sizes.head_dim, dtype=sizes.dtype)
    key = torch.ones(num_rows, sizes.num_kv_heads, sizes.head_dim, dtype=sizes.dtype)

    def attend() -> None:
        native_attention(team, [rows], next(layers), query, key, key, sizes.scale)

    num_bytes, num_flops = attention_costs(sizes, cache.length, num_rows)
    between = num_bytes * sizes.num_layers
    return Operation("attention, one layer", num_rows, num_bytes, num_flops, between, attend, cache.length)


def forward_operation(
    sizes: DecoderSizes, target: TargetModel, in_torch: TargetModel, cache: FullKVCache, num_rows: int
) -> Operation:
    rows = [rows_behind(cache, num_rows)]
    *layer, (head_depth, head_columns) = matrix_shapes(sizes).values()
    num_weights = sizes.num_layers * sum(depth * columns for depth, columns in layer) + head_depth * head_columns
    attended, multiplied = attention_costs(sizes, cache.length, num_rows)
    num_bytes = num_weights * sizes.dtype.itemsize + sizes.num_layers * attended
    num_flops = 2 * num_rows * num_weights + sizes.num_layers * multiplied
    calls = (functools.partial(each.verify, rows) for each in (target, in_torch))
    return Operation("whole forward", num_rows, num_bytes, num_flops, num_bytes, next(calls), cache.length, next(calls))


def sampling_operations(vocab: int, row_counts: tuple[int, ...]) -> Iterator[Operation]:
    logits = 4 * torch.randn(row_counts[-1], vocab, generator=torch.Generator().manual_seed(0))
    num_bytes = logits[0].nbytes

    def operation(name: str, num_rows: int, call: Callable[[], object]) -> Operation:
        return Operation(name, num_rows, num_rows * num_bytes, 0, num_rows * num_bytes, call)

    for num_rows in row_counts:
        yield operation("walk", num_rows, _walk_of_all(logits[:num_rows]))
    for num_rows in row_counts:
        yield operation("top candidates", num_rows, functools.partial(sampling.top_candidates, logits[:num_rows]))


def _walk_of_all(logits: torch.Tensor) -> Callable[[], object]:
    sampler = sampling.NativeSampler(Sequence("bench", [0], SAMPLING, logits.shape[1]))
    drawn: list[int] = []
    for row in range(1, len(logits)):
        drawn = sampling.walk([sampler], [DraftTree.chain(drawn)], [logits[:row]])[0].drawn
    return functools.partial(sampling.walk, [sampler], [DraftTree.chain(drawn)], [logits])


def rows_behind(cache: FullKVCache, num_rows: int) -> SequenceRows:
    return tree_rows(cache, 0, DraftTree.chain([0] * (num_rows - 1)))


def attention_costs(sizes: DecoderSizes, length: int, num_rows: int) -> tuple[int, int]:
    """Return bytes and floating-point operations of one layer."""
    num_positions = length + num_rows
    num_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * sizes.dtype.itemsize * num_positions
    return num_bytes, 4 * num_rows * sizes.num_heads * sizes.head_dim * num_positions
