"""One layer of random scanned keys and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swiftbatch.worker.forward.forward_interface import SparseRows, partial_rows
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import ScannedKeys
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kv.cache_parts import everything_of

NUM_CHUNKS = 3
LENGTH = NUM_CHUNKS * SCAN_CHUNK
NUM_ENTRIES = 64  # entries seen beside the scanned keys


class Text:
    """A one-layer cache, jointly normal except for tests' changes."""

    def __init__(self, head_dim: int = 64, dtype: torch.dtype = torch.float32, num_kv_heads: int = 2) -> None:
        self.shape = CacheShape(1, num_kv_heads, head_dim, dtype, torch.device("cpu"))
        generator = torch.Generator().manual_seed(head_dim)
        self.full = FullKVCache(self.shape, LENGTH)
        keys, values = self.full.layer(0)
        mixed = torch.randn(head_dim, head_dim, generator=generator) / head_dim**0.5
        noise = torch.randn(2, *keys.shape, generator=generator)
        keys.copy_(0.3 + noise[0] @ (torch.eye(head_dim) + 0.5 * mixed))
        values.copy_(0.5 * noise[0] @ mixed + noise[1])
        self.full.advance(LENGTH)
        self.entries = everything_of(self.shape, self.full.prefix(NUM_ENTRIES))

    def keep(self, kept: CacheShape) -> None:
        full = FullKVCache(kept, LENGTH)
        full.rows.buffer[:] = kept.kept(self.full.rows.buffer)
        full.advance(LENGTH)
        self.full, self.entries = full, everything_of(kept, full.prefix(NUM_ENTRIES))

    def scanned(self, num_best: int, first: int = 0, lengths: tuple[int, ...] = (LENGTH,)) -> ScannedKeys:
        """Scan in one call per length."""
        keys = ScannedKeys([self.full.stored(0)], first, LENGTH, num_best, self.shape.dtype)
        for length in lengths:
            keys.extend(length)
        return keys

    def rows(self, num_rows: int, scanned: ScannedKeys | None) -> SparseRows:
        """Return a chain of rows after the entries."""
        self.entries.scanned = scanned
        return partial_rows(self.entries, 0, LENGTH, DraftTree.chain([0] * (num_rows - 1)))

    def attend(self, query: Tensor, num_best: int, variant: str, num_threads: int = 1, first: int = 0) -> Tensor:
        """Return `[num_rows, num_heads, head_dim]`; the rows' own keys are zero."""
        own = torch.zeros(len(query), self.shape.num_kv_heads, self.shape.head_dim, dtype=self.shape.dtype)
        rows = self.rows(len(query), self.scanned(num_best, first))
        team = Team(load_library(variant), num_threads)
        return native_attention(team, [rows], 0, query, own, own, self.shape.head_dim**-0.5)

    def expected(self, query: Tensor, first: int = 0) -> Tensor:
        """Attend exactly to entries, keys from `first` on, and the rows' own."""
        num_rows, num_heads, head_dim = query.shape
        keys, values = (part[:, :LENGTH].double() for part in self.full.layer(0))
        seen = torch.cat([torch.arange(NUM_ENTRIES), torch.arange(first, LENGTH)])
        group, output = num_heads // len(keys), torch.empty(query.shape, dtype=torch.float64)
        for head in range(num_heads):
            scores = query[:, head].double() @ keys[head // group, seen].T / math.sqrt(head_dim)
            for row in range(num_rows):
                weights = torch.softmax(torch.cat([scores[row], torch.zeros(row + 1)]), dim=0)
                output[row, head] = weights[: len(seen)] @ values[head // group, seen]
        return output


def queries(text: Text, num_rows: int = 3, group: int = 2, deviation: float = 2.0) -> Tensor:
    """Return queries whose scores deviate by about this much."""
    generator = torch.Generator().manual_seed(7)
    size = (num_rows, text.shape.num_kv_heads * group, text.shape.head_dim)
    return (deviation * torch.randn(size, generator=generator)).to(text.shape.dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).square().mean() / expected.square().mean()).sqrt())
