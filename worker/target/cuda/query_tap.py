"""Queries of a forward's first row on a GPU: the forward once more as a graph, which keeps them on its way."""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.cuda.decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.graph import Capture


class CudaQueryTap:
    """Runs the rows of the decoder's table and keeps the first one's queries."""

    def __init__(self, decoder: CudaDecoder, device: torch.device, capture: Capture) -> None:
        sizes = decoder.sizes
        heads = (sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
        self._queries = torch.zeros(sizes.num_layers, *heads, dtype=sizes.dtype, device=device)

        def keep(layer: int, query: torch.Tensor) -> None:
            self._queries[layer].copy_(query[0])

        self._graph = capture(lambda: decoder.forward(keep), device)

    def replay(self) -> torch.Tensor:
        """Return the queries, `[num_layers, num_kv_heads, group, head_dim]`, until the next call."""
        self._graph.replay()
        return self._queries
