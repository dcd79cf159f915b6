"""Keys, values and states of all slots, as a decoder's kernels on a GPU read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    slots. `windowed` is the pool of layers with a window, which `buffer` then lacks. With `stripes`, which are each
    layer's heads, a buffer's layers lie side by side as heads of one.
    """

    buffer: Tensor
    num_positions: int  # of the longest sequence
    pages: PageTable | None = None
    windowed: tuple[Tensor, PageTable] | None = None
    states: StateBuffers | None = None
    stripes: tuple[int, ...] = ()

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
            own = zip(in_windows, self.stripes, strict=True) if self.stripes else ()
            stripes = [count for is_own, count in own if is_own == in_window]
            check_buffer(buffer, sizes, in_windows.count(in_window), stripes)
            # slots that share pages need no copy: the stride is 0
            rows = buffer if pages is None else buffer.expand(-1, -1, self.num_slots, -1, -1, -1)
            found[in_window] = _by_layer(rows, stripes), pages
        return [(next(found[in_window][0]), found[in_window][1]) for in_window in in_windows]


def _by_layer(rows: Tensor, stripes: Sequence[int]) -> Iterator[Tensor]:
    return iter(rows[0].split(list(stripes), dim=2) if stripes else rows)


def check_buffer(buffer: Tensor, sizes: DecoderSizes, num_layers: int, stripes: Sequence[int] = ()) -> None:
    """Raise ValueError for a buffer whose sizes are not those of `num_layers` attending layers."""
    width = cuda_row_width(buffer.dtype, sizes.dtype, sizes.head_dim)
    num_parts = 2 if sizes.latent is None else 1
    num_layers, num_heads = (1, sum(stripes)) if stripes else (num_layers, sizes.num_kv_heads)
    expected = (num_layers, num_parts, buffer.shape[2], num_heads, buffer.shape[4], width or sizes.head_dim)
    if buffer.shape != expected or width is None or buffer.stride(-1) != 1:
        raise ValueError(f"found an arena of {buffer.dtype} {list(buffer.shape)}, expected {sizes.dtype} {expected}")
