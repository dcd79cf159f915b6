"""Sizes that kernels, caches, samplers and memory plans share, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 64  # attention has a boundary every so many positions
TILE_ROWS = 32  # forwards in `transformers`' layers and the C kernels' panels have so many rows
MIN_ROWS = 2  # a single row may take another kernel (matrix times vector), with other bits
FEWEST_COLUMNS = 64  # with fewer columns, bits of torch's bf16 products depend on the batch (measured)
NUM_ROWS = 64  # forwards on a GPU are padded to it by default
ROW_CHOICES = (NUM_ROWS, 128, 256)  # whole tiles of every kernel
LEAST_BLOCK_ROWS = 32  # rows of a forward per least block of a split
MOST_SLOTS = 32  # up to here twice the jobs give a fifth more tokens (docs/speed.md), but each job takes longer
RING_LAYERS = 2  # the GPU uses one layer and copies the other
LANES = 16  # the kernels multiply so many numbers at once, so it divides all widths
BLOCK_DEPTH = 128  # a GPU's products take so many numbers along the depth per step
KV_SCALE_BYTES = 4  # a scale follows the codes of an 8-bit key or value
CUDA_SCALE_BYTES = 16  # padding aligns a GPU's rows to 16 bytes
HEAD_DIMS = range(64, 257, LANES)
MOST_LATENT, MOST_LATENT_HEADS = 16384, 1024  # numbers of a latent vector; heads that share one


@dataclass(frozen=True)
class MLASizes:
    """Sizes of attention whose cache has a latent vector per position, followed by the rotary part of the keys."""

    rank: int
    query_rank: int  # 0: queries have no vector of their own
    nope_dim: int  # numbers of a head's query and keys that are not rotated
    rope_dim: int
    value_dim: int

    @property
    def entry_dim(self) -> int:
        """Return the numbers per cached position and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def most_slots(num_rows: int) -> int:
    """Return the most jobs at a time on a GPU."""
    return MOST_SLOTS if num_rows == NUM_ROWS else num_rows


def least_blocks(num_rows: int) -> int:
    """Return the least blocks per split: with many jobs, splits of one block cost more than they save."""
    return 1 if num_rows == NUM_ROWS else num_rows // LEAST_BLOCK_ROWS


def fills_blocks(group: int, depth: int) -> bool:
    """Return whether groups of packed weights fit the blocks of the depth in a GPU's products."""
    return group == depth or BLOCK_DEPTH % group == 0 or group % BLOCK_DEPTH == 0


def sizes_fault(
    *,
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    latent: MLASizes | None = None,
) -> str | None:
    """Return which size of a dense decoder the kernels do not support; None if all fit."""
    if latent is not None and (fault := _latent_fault(latent, num_heads, num_kv_heads, head_dim)):
        return fault
    if latent is None and head_dim not in HEAD_DIMS:
        return f"found head_dim {head_dim}, expected a multiple of {LANES} from 64 to 256"
    if min(num_layers, hidden, num_kv_heads, intermediate, vocab) < 1:
        return "found a size below 1"
    if hidden % LANES or intermediate % LANES:
        return f"found widths {hidden} and {intermediate}, expected multiples of {LANES}"
    if num_heads < 1 or num_heads % num_kv_heads:
        return f"found {num_heads} heads for {num_kv_heads} of keys"
    return None


def _latent_fault(latent: MLASizes, num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """Return which size of latent attention the kernels do not support."""
    widths = (latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
    if min(widths) < LANES or max(*widths, latent.query_rank) > MOST_LATENT or num_heads > MOST_LATENT_HEADS:
        return f"found latent attention of {num_heads} heads and widths {widths}, expected others"
    if any(width % LANES for width in (*widths, latent.query_rank)):
        return f"found widths {widths} and {latent.query_rank} of latent attention, expected multiples of {LANES}"
    if (num_kv_heads, head_dim) != (1, latent.entry_dim):
        return f"found {num_kv_heads} heads of {head_dim} in a cache, expected one of {latent.entry_dim}"
    return None
