"""Keys, values and states of all slots, as a decoder's kernels on a GPU read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.kv_codes import cuda_row_width

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers
    from swiftbatch.worker.kernels.decoder_weights import DecoderSizes


@dataclass(frozen=True)
class DeviceCaches:
    """Buffers `[num_layers, num_parts, num_slots, num_kv_heads, capacity, row_width]` of attending layers, and states.

    A part has keys or values; latent attention has one part. With `pages`, the buffer is one pool of pages in place of
    slots. `windowed` is the pool of layers with a window, which `buffer` then lacks.
    """

    buffer: Tensor
    num_positions: int  # of the longest sequence
    pages: PageTable | None = None
    windowed: tuple[Tensor, PageTable] | None = None
    states: StateBuffers | None = None

    @property
    def num_slots(self) -> int:
        return self.buffer.shape[2] if self.pages is None else len(self.pages.numbers)

    @property
    def capacity(self) -> int:
        return self.buffer.shape[4] if self.pages is None else self.pages.capacity

    def layers(self, sizes: DecoderSizes, in_windows: Sequence[bool]) -> list[tuple[Tensor, PageTable | None]]:
        """Return the rows of each attending layer, `[num_parts, num_slots, num_kv_heads, capacity, row_width]`.

        `in_windows` says of each layer whether its rows are in the windows' pool. Raises ValueError for other sizes.
        """
        pools = {False: (self.buffer, self.pages)} | ({} if self.windowed is None else {True: self.windowed})
        found = {}
        for in_window, (buffer, pages) in pools.items():
            check_buffer(buffer, sizes, in_windows.count(in_window))
            # slots that share pages need no copy: the stride is 0
            rows = buffer if pages is None else buffer.expand(-1, -1, self.num_slots, -1, -1, -1)
            found[in_window] = iter(rows), pages
        return [(next(found[in_window][0]), found[in_window][1]) for in_window in in_windows]


def check_buffer(buffer: Tensor, sizes: DecoderSizes, num_layers: int) -> None:
    """Raise ValueError for a buffer whose sizes are not those of `num_layers` attending layers."""
    width = cuda_row_width(buffer.dtype, sizes.dtype, sizes.head_dim)
    num_parts = 2 if sizes.latent is None else 1
    expected = (num_layers, num_parts, buffer.shape[2], sizes.num_kv_heads, buffer.shape[4], width or sizes.head_dim)
    if buffer.shape != expected or width is None or buffer.stride(-1) != 1:
        raise ValueError(f"found an arena of {buffer.dtype} {list(buffer.shape)}, expected {sizes.dtype} {expected}")
