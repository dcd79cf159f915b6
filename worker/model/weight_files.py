"""A model's weights, hashed while being read. No tensor stays mapped: a file's change would reach the running model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.quantized_weights import PackedExperts, PackedMatrix, Weight, plain
from swiftbatch.worker.model.digests import MOST_READERS, HashedStream, weight_files
from swiftbatch.worker.model.file_checks import PICKLED
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.dequantization import weight_of
from swiftbatch.worker.model.formats.layout import Layout, PackedTensor
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX
from swiftbatch.worker.model.gguf.gguf_weights import gguf_weights
from swiftbatch.worker.model.model_files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.pickled_weights import DTYPES, mapped_tensors, pickled_weights
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD

FORMS = {SUFFIX: "GGUF", PICKLED: "PyTorch weights"}  # others are safetensors
T = TypeVar("T")
END: Any = object()
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


class Assembly:
    """Assembles the weights of a text model from tensors in any order."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._names, self.dtype = layout.names, dtype
        self._places = {stored: (each, part) for each in layout.packed for part, stored in each.parts.items()}
        self._parts: dict[str, dict[str, Tensor]] = {}

    def take(self, stored: str, tensor: Tensor) -> tuple[str, Weight] | None:
        """Return the weight that this tensor completes, and its name. Raises FormatError for damaged parts."""
        if stored in self._names:
            return self._names[stored], tensor
        if stored not in self._places:
            return None
        matrix, part = self._places[stored]
        parts = self._parts.setdefault(matrix.name, {})
        parts[part] = tensor
        return None if len(parts) < len(matrix.parts) else (matrix.name, self._whole(matrix))

    def _whole(self, matrix: PackedTensor) -> Weight:
        parts = self._parts.pop(matrix.name)
        codes = max(parts.values(), key=lambda part: part.nbytes)
        if codes.dim() > 1 and _has_blank(codes.view(torch.uint8)):  # code 0 may stand for another number than zero
            raise _blank(matrix.name)
        try:
            return weight_of(matrix.scheme, parts, self.dtype)
        except FormatError as error:
            raise FormatError(f"{matrix.name}: {error}") from None


def read_tensors(
    files: ModelFiles, dtype: torch.dtype, place: Callable[[Weight], Weight], kept: Collection[str] = ()
) -> dict[str, Weight]:
    """Read a text model's weights, as `place` returns them. Weights named in `kept` keep their stored dtype.

    Quantized weights become packed matrices, or dequantized ones of this dtype. Tensors that do not affect text, and a
    tied head, are hashed and dropped. Up to MOST_READERS files are read at a time; if `place` moves tensors to a
    device, at most two of each file are in host memory. Raises ModelError for a damaged file, OtherModelError if a
    file's hash is not that of `files.digests`.
    """
    weights: dict[str, Weight] = {}
    config = read_config(files.name, files.path)
    assembly = Assembly(stored_layout(files.name, files.path), dtype)
    found = weight_files(files.path)
    of_files = (_checked_tensors(file, files, config, dtype) for file in found)
    is_gguf = any(file.suffix == SUFFIX for file in found)  # then torch computes, whose threads are the main thread's
    for file, stored, tensor in chain.from_iterable(of_files) if is_gguf else interleaved(of_files, MOST_READERS):
        with _faults_of(file, files.name):
            whole = (stored, tensor) if is_gguf else assembly.take(stored, cast(Tensor, tensor))
            if whole is not None:
                _refuse_blank(*whole)
                _refuse_endless(*whole)
        if whole is not None:
            weights[whole[0]] = whole[1] if whole[0] in kept else place(whole[1])
    if config.get("tie_word_embeddings") and EMBEDDING in weights:
        _drop_head_of(weights, files)
    return weights


def interleaved(sources: Iterator[Generator[T]], num_threads: int) -> Iterator[T]:
    """Yield the items of all sources, in any order, while threads compute the next item of `num_threads` sources."""
    pending: dict[Future[T], Generator[T]] = {}
    try:
        with ThreadPoolExecutor(num_threads) as threads:
            pending |= {threads.submit(next, source, END): source for source in islice(sources, num_threads)}
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    source: Generator[T] | None = pending.pop(future)
                    if (found := future.result()) is END:
                        source = next(sources, None)
                    if source is not None:
                        pending[threads.submit(next, source, END)] = source
                    if found is not END:
                        yield found
    finally:
        for left in pending.values():  # their own threads end here, and not wherever garbage is collected
            left.close()


def _checked_tensors(
    file: Path, files: ModelFiles, config: dict[str, Any], dtype: torch.dtype
) -> Generator[tuple[Path, str, Weight]]:
    """Yield a file's tensors as they are stored, or a GGUF file's weights, after the file.

    Raises ModelError, and at the end OtherModelError, as `read_tensors` does.
    """
    with file.open("rb") as stream, ThreadPoolExecutor(max_workers=1) as thread:
        hashed = HashedStream(stream, thread)
        with _faults_of(file, files.name):
            for name, weight in _weights_in(file, hashed, config, dtype):
                yield file, name, weight
        files.refuse_other_weights(file.name, hashed.digest())


@contextmanager
def _faults_of(file: Path, model: str) -> Iterator[None]:
    """Raise ModelError for faults of a file."""
    try:
        yield
    except FormatError as error:
        raise ModelError(f"model {model}: {file} has {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        form = FORMS.get(file.suffix, "safetensors")
        raise ModelError(f"model {model}: {file} can't be read as {form} ({error}); copy it again") from None


def _weights_in(
    file: Path, hashed: HashedStream, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    if file.suffix == SUFFIX:
        return gguf_weights(file, hashed, config, dtype)
    return pickled_weights(file, hashed) if file.suffix == PICKLED else _stored(hashed)


def stored_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors or PyTorch file as they are stored. Raises the errors of their readers."""
    if file.suffix == PICKLED:
        yield from mapped_tensors(file).items()
        return
    with safe_open(file, framework="pt") as stored:
        yield from ((name, stored.get_tensor(name)) for name in stored.keys())  # noqa: SIM118 (no mapping)


def _refuse_blank(name: str, weight: Weight) -> None:
    """Raise FormatError for a matrix of zeros, which an unfinished download leaves."""
    if len(weight.shape) < 2 or min(weight.shape[-2:]) < 2 or name.endswith("bias") or "norm" in name:
        return
    if isinstance(weight, PackedMatrix):
        number = weight.num_experts if isinstance(weight, PackedExperts) else 1
        parts = (part.unflatten(0, (number, -1)) for part in (weight.scales, weight.offsets) if part is not None)
        is_blank = any(all(map(_is_blank, of_one)) for of_one in zip(*parts, strict=True))
    else:
        is_blank = _has_blank(weight)
    if is_blank:
        raise _blank(name)


def _refuse_endless(name: str, weight: Weight) -> None:
    """Raise FormatError for numbers that are not finite, which limits of activations or a choice of keys may hide."""
    if isinstance(weight, PackedMatrix) or not weight.numel():  # formats refuse scales and codes that are no numbers
        return
    numbers = weight.float() if weight.itemsize == 1 else weight  # `aminmax` takes no float8
    if not all(map(math.isfinite, numbers.aminmax())):  # one pass, much faster than `isfinite`
        raise FormatError(f"numbers in {name} that are not finite: it is damaged; copy it again")


def _blank(name: str) -> FormatError:
    return FormatError(f"nothing but zeros in {name}: it was cut off, or is damaged; copy it again")


def _has_blank(matrices: Tensor) -> bool:
    return any(map(_is_blank, matrices if matrices.dim() > 2 else [matrices]))


def _is_blank(matrix: Tensor) -> bool:
    """Return whether a matrix is all zeros. Checking the first row first is faster."""
    return not bool(matrix[0].any()) and not bool(matrix.any())


def _drop_head_of(weights: dict[str, Weight], files: ModelFiles) -> None:
    """Drop a tied head. Raises ModelError if it differs from the embedding."""
    head = weights.pop(HEAD, None)
    if head is not None and not torch.equal(plain(head), plain(weights[EMBEDDING])):
        raise ModelError(
            f"model {files.name}: config.json ties the head to the embedding, and its weights hold another {HEAD}; "
            "copy all files again, or say tie_word_embeddings = false"
        )


def _stored(hashed: HashedStream) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a safetensors file's tensors in order. Raises ValueError for a damaged file."""
    size = int.from_bytes(hashed.read(8), "little")
    if size > LONGEST_HEADER:
        raise ValueError(f"found a header of {size:,} bytes")
    said = {name: entry for name, entry in json.loads(hashed.read(size)).items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(said.items(), key=lambda pair: tuple(pair[1]["data_offsets"])):
        shape, dtype = _form(name, entry, end)
        end = entry["data_offsets"][1]
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        hashed.fill(memoryview(cast(Any, data.numpy())))
        yield name, data.view(dtype).view(shape)
    if hashed.stream.read(1):
        raise ValueError(f"found more than the {end:,} bytes of its tensors")


def _form(name: str, entry: dict[str, Any], expected_start: int) -> tuple[list[int], torch.dtype]:
    """Return a tensor's shape and dtype.

    Raises ValueError unless its bytes directly follow those of the previous tensor.
    """
    shape, said, (start, end) = entry["shape"], entry["dtype"], entry["data_offsets"]
    if said not in DTYPES:
        raise ValueError(f"found {name} as {said}, expected one of {', '.join(DTYPES)}")
    if start != expected_start or end - start != math.prod(shape) * DTYPES[said].itemsize or min(shape, default=0) < 0:
        raise ValueError(f"found {name} of shape {shape} at bytes {start} to {end}")
    return shape, DTYPES[said]
