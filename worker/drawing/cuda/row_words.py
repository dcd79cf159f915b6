"""The table of 4-byte words that says how each row is drawn: the host fills it by name, kernels read it by column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.adjustments import counts_output, has_bias
from swiftbatch.worker.drawing.filters.filter_list import NUMBERS, filter_numbers

if TYPE_CHECKING:
    from swiftbatch.worker.drawing.sequence import Sequence

ROW = np.dtype(
    [
        ("noise_key", "<u8"),
        ("position", "<i8"),  # of the token to be drawn
        ("slot", "<i4"),  # -1: a padding row, of which nothing is read
        ("depth", "<i4"),  # of the row's node in its draft tree: how many tokens it has behind the committed ones
        ("window", "<i4"),  # of the penalty, in tokens
        ("temperature", "<f4"),  # 0: the best token, without noise
        ("penalty", "<f4"),  # 1: off
        *((number.name, "<i4" if number.is_whole else "<f4") for number in NUMBERS),
        ("frequency", "<f4"),  # 0: off
        ("presence", "<f4"),  # 0: off
        ("has_bias", "<i4"),  # 0: none is read
        ("num_masked", "<i4"),  # tokens that can't come at this row
        ("is_restricted", "<i4"),  # 0: its mask is not read
    ]
)
NUM_WORDS = ROW.itemsize // 4  # of a row
NUM_DRAFTED = 64  # room for the tokens of a row's own path through its tree
NUM_MASKED = 512  # room for the tokens that can't come at a row
PADDING = -1


def column_of(name: str) -> int:
    """The first word of a field."""
    fields: Mapping[str, Any] = ROW.fields or {}
    return int(fields[name][1]) // 4


def padding_rows(num_rows: int) -> NDArray[Any]:
    """A table `[num_rows] ROW` in which nothing is to be drawn; `.view(np.int32)` of it is what the device gets."""
    rows = np.zeros(num_rows, dtype=ROW)
    rows["slot"] = PADDING
    return rows


def fill_row(
    rows: NDArray[Any],
    index: int,
    sequence: Sequence,
    slot: int,
    position: int,
    depth: int,
    num_masked: int = 0,
    is_restricted: bool = False,
    words: tuple[float, ...] | None = None,
) -> None:
    """Say how row `index` is drawn; `words` are `parameter_words` of the parameters, where these are at hand."""
    words = parameter_words(sequence.sampling) if words is None else words
    rows[index] = (sequence.noise_key, position, slot, depth, *words, num_masked, is_restricted)


def parameter_words(params: SamplingParams) -> tuple[float, ...]:
    """The fields of a row, from its window to its bias, that follow from the parameters."""
    return (
        params.penalty_window,
        params.temperature,
        params.repetition_penalty,
        *filter_numbers(params),
        params.frequency_penalty,
        params.presence_penalty,
        has_bias(params),
    )


def needs_slot(params: SamplingParams) -> bool:
    """Return whether a row reads anything of its slot: counts, or a bias."""
    return params.repetition_penalty != 1.0 or counts_output(params) or has_bias(params)
