"""An `Attention` behind partial caches that sees scanned texts as well, with the buffers of one that does not."""

from __future__ import annotations

from torch import Tensor

from swiftbatch.worker.kernels.cuda.attentions import TritonAttention
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.scan.scan import Scan, scan_attend
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import ScannedTexts, ScanScratch


class ScanAttention:
    """An `Attention` that takes turns with another one, whose queries and partial sums it uses."""

    def __init__(self, other: TritonAttention, texts: ScannedTexts, full: Tensor) -> None:
        """The best keys are read where `texts` has them, laid out as in `full [:, 2, :, num_kv_heads, :, head_dim]`."""
        shape, num_heads = other.shape, other.query.shape[1]
        scratch = ScanScratch.empty(texts.sizes, num_heads, shape.num_splits, full.device)
        self._other = other
        strides = full.stride(1), full.stride(3), full.stride(4)
        self._scan = Scan(shape, texts, scratch, other.scale, strides)
        self.query = other.query

    @property
    def numerics(self) -> str:
        return self._other.numerics

    def places(self, table: CudaRowTable[Tensor]) -> None:
        return None

    def attend(
        self, layer: int, keys: Tensor, values: Tensor, bias: Tensor | None, table: CudaRowTable[Tensor], mixed: Tensor
    ) -> None:
        """Raises ValueError without biases."""
        if bias is None:
            raise ValueError("found no biases, which entries of partial caches have")
        scratch = self._other.scratch
        scan_attend(self._scan, layer, self.query, (keys, values), bias, table, scratch, mixed)

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        self._other.put(query, table)

    def heads(self) -> Tensor:
        return self._other.heads()
