"""Sizes that kernels, caches, draws and memory plans agree on. Light: the command line knows them too."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 64  # positions between two boundaries of attention
TILE_ROWS = 32  # rows of a forward by `transformers`' layers, and of the C kernels' panels
MIN_ROWS = 2  # a single row would take another kernel (matrix times vector) in some shapes, with other bits
FEWEST_COLUMNS = 64  # of torch's bf16 products whose rows have their own bits however few they are: measured
NUM_ROWS = 64  # rows of every forward on a GPU, padding included, where a run does not have more
ROW_CHOICES = (NUM_ROWS, 128, 256)  # whole tiles of every kernel
LEAST_BLOCK_ROWS = 32  # of a forward, for each block that a split has at least
MOST_SLOTS = 32  # twice as many bring a fifth more tokens up to here (docs/speed.md), and each job takes longer
RING_LAYERS = 2  # layers of offloaded caches that are on a GPU at a time: one is used while the next comes
LANES = 16  # numbers that the kernels multiply at once: widths are multiples of it
BLOCK_DEPTH = 128  # numbers that a GPU's products take along the depth at a time
KV_SCALE_BYTES = 4  # behind the codes of a key or a value in 8 bits
CUDA_SCALE_BYTES = 16  # the same on a GPU, with what fills up: rows begin where loads of 16 bytes may
HEAD_DIMS = range(64, 257, LANES)
MOST_LATENT, MOST_LATENT_HEADS = 16384, 1024  # numbers of a latent vector; heads that share one


@dataclass(frozen=True)
class MLASizes:
    """Sizes of attention whose cache holds a latent vector per position, of which all heads make keys and values.

    Behind the vector lies the turned part of the keys, which all heads share.
    """

    rank: int  # numbers of the vector
    query_rank: int  # of one that queries are made of; 0 where they are made of rows
    nope_dim: int  # numbers of a head's query and keys that are not turned
    rope_dim: int
    value_dim: int

    @property
    def entry_dim(self) -> int:
        """Numbers that a cache holds of a position in a layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim


def most_slots(num_rows: int) -> int:
    """The most jobs at a time on a GPU whose forwards have so many rows, one for each job at least where they are many.

    With the fewest rows, as many as on a CPU.
    """
    return MOST_SLOTS if num_rows == NUM_ROWS else num_rows


def least_blocks(num_rows: int) -> int:
    """Blocks that a split of a prefix has at least, where forwards have so many rows.

    Among many jobs, splits of one block would write and read more than they save. With the fewest rows it is one, as in
    all runs before there was a choice.
    """
    return 1 if num_rows == NUM_ROWS else num_rows // LEAST_BLOCK_ROWS


def fills_blocks(group: int, depth: int) -> bool:
    """Tell whether groups of packed weights fill the blocks of the depth that a GPU's products take at a time."""
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
    """Say which size of a dense decoder the kernels do not take; None where they take all."""
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
    """Say which size of latent attention the kernels do not take. To a cache it is one head."""
    widths = (latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
    if min(widths) < LANES or max(*widths, latent.query_rank) > MOST_LATENT or num_heads > MOST_LATENT_HEADS:
        return f"found latent attention of {num_heads} heads and widths {widths}, expected others"
    if any(width % LANES for width in (*widths, latent.query_rank)):
        return f"found widths {widths} and {latent.query_rank} of latent attention, expected multiples of {LANES}"
    if (num_kv_heads, head_dim) != (1, latent.entry_dim):
        return f"found {num_kv_heads} heads of {head_dim} in a cache, expected one of {latent.entry_dim}"
    return None
