"""Weights as `torch.save` writes them (`pytorch_model.bin`), read by torch's loader of tensors alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from swiftbatch.worker.model.config_values import line_of, shown
from swiftbatch.worker.model.digests import HashedStream
from swiftbatch.worker.model.formats.contract import StoredTensor

DTYPES = {  # by their names in safetensors files
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 1 << 24  # of a read
MOST_SAID = 300  # characters of an error's text
CALLED = re.compile(r"GLOBAL (\S+)")  # a function that a pickle asks for, in the loader's text
NO_ARCHIVE = "mmap can only be used"  # as above, of a file that is no zip archive
BY_SAFETENSORS = "get its weights as safetensors"


class PickledError(ValueError):
    """A file is no weights of `torch.save`. The text, after the file's name, says why and what to do."""


def stored_in_pickle(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a file's tensors as a header would describe them. Raises PickledError."""
    for name, tensor in mapped_tensors(file).items():
        yield name, StoredTensor(NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def pickled_weights(file: Path, hashed: HashedStream) -> Iterator[tuple[str, torch.Tensor]]:
    """Hash a file, and then yield its tensors, each in memory of its own. Raises PickledError or ValueError."""
    left = os.fstat(hashed.stream.fileno()).st_size
    while left:
        left -= len(hashed.read(min(left, BLOCK_BYTES)))
    for name, tensor in mapped_tensors(file).items():
        yield name, tensor.clone(memory_format=torch.contiguous_format)


def mapped_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Map a file's tensors, whose numbers are read when they are used. Runs no code of the file. Raises PickledError.

    Tensors are in the order of their places in the file.
    """
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise PickledError(_reason(error)) from None
    if not isinstance(found, dict):
        raise PickledError(f"holds a {type(found).__name__}, expected tensors by name; {BY_SAFETENSORS}")
    for name, each in found.items():
        if not isinstance(name, str) or type(each) not in (torch.Tensor, torch.nn.Parameter):
            raise PickledError(
                f"holds {shown(str(name))} as {type(each).__name__}, expected tensors by name; {BY_SAFETENSORS}"
            )
        if each.layout != torch.strided or each.is_quantized:
            raise PickledError(f"holds {shown(name)} as {each.layout}, expected plain tensors; {BY_SAFETENSORS}")
    return {name: each.detach() for name, each in sorted(found.items(), key=lambda pair: pair[1].data_ptr())}


def _reason(error: Exception) -> str:
    if called := CALLED.search(str(error)):
        return f"asks for {shown(called[1])}, and weights need tensors alone, so it is not read; {BY_SAFETENSORS}"
    if NO_ARCHIVE in str(error):
        return f"is no file of torch.save, or one of torch before 1.6; copy it again, or {BY_SAFETENSORS}"
    return f"is damaged or cut off ({line_of(error, MOST_SAID)}); copy it again"
