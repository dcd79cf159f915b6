"""The forms that matrices stay packed in, as the heads of their parts tell them. Without torch."""

from __future__ import annotations

import math

from swiftbatch.worker.model.gguf.tensor_types import PackedKind

SMALLEST_GROUP = 16  # that a group of another size is cut into; below, the scales would outweigh the codes
EXACT_SCALES = ("BF16", "F16")  # short enough for exact products with every code


def group_that_divides(depth: int, group: int) -> int | None:
    """The size of groups that a packed matrix may have so that each has one scale of the stored groups."""
    size = depth if group >= depth else math.gcd(depth, group)
    return size if size % 2 == 0 and (size in (group, depth) or size >= SMALLEST_GROUP) else None


def form_of(code: str, bits: int, depth: int, group: int | None, has_offsets: bool = False) -> PackedKind | None:
    """The form of codes in groups of a stored size, None for all of the depth; None for one that is not packed."""
    size = group_that_divides(depth, group or depth)
    return None if size is None else PackedKind(code, bits, size, has_offsets)


def form_of_integers(bits: int, depth: int, group: int | None, scales: str, is_centred: bool) -> PackedKind | None:
    """That of integers with zeros, which are all in the middle if they are `centred`.

    None where the numbers alone tell: scales of float32 may be too long for exact products.
    """
    if bits == 8 and is_centred:
        return form_of("int8", 8, depth, group)
    if scales not in EXACT_SCALES:
        return None
    code, width = ("uint4", 4) if bits <= 4 else ("uint8", 8)
    return form_of(code, width, depth, group, has_offsets=True)
