"""Sizes that kernels, caches, draws and memory plans agree on. Light: the command line knows them too."""

from __future__ import annotations

BLOCK = 64  # positions between two boundaries of attention
TILE_ROWS = 32  # rows of a forward by `transformers`' layers, and of the C kernels' panels
MIN_ROWS = 2  # a single row would take another kernel (matrix times vector) in some shapes, with other bits
FEWEST_COLUMNS = 64  # of torch's bf16 products whose rows have their own bits however few they are: measured
NUM_ROWS = 64  # rows of every forward on a GPU, padding included
MOST_SLOTS = 32  # twice as many bring a fifth more tokens up to here (docs/speed.md), and each job takes longer
RING_LAYERS = 2  # layers of offloaded caches that are on a GPU at a time: one is used while the next comes
LANES = 16  # numbers that the kernels multiply at once: widths are multiples of it
BLOCK_DEPTH = 128  # numbers that a GPU's products take along the depth at a time
KV_SCALE_BYTES = 4  # behind the codes of a key or a value in 8 bits
CUDA_SCALE_BYTES = 16  # the same on a GPU, with what fills up: rows begin where loads of 16 bytes may
HEAD_DIMS = range(64, 257, LANES)


def fills_blocks(group: int, depth: int) -> bool:
    """Tell whether groups of packed weights fill the blocks of the depth that a GPU's products take at a time."""
    return group == depth or BLOCK_DEPTH % group == 0 or group % BLOCK_DEPTH == 0


def sizes_fault(
    *, num_layers: int, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate: int, vocab: int
) -> str | None:
    """Say which size of a dense decoder the kernels do not take; None where they take all."""
    if head_dim not in HEAD_DIMS:
        return f"found head_dim {head_dim}, expected a multiple of {LANES} from 64 to 256"
    if min(num_layers, hidden, num_kv_heads, intermediate, vocab) < 1:
        return "found a size below 1"
    if hidden % LANES or intermediate % LANES:
        return f"found widths {hidden} and {intermediate}, expected multiples of {LANES}"
    if num_heads < 1 or num_heads % num_kv_heads:
        return f"found {num_heads} heads for {num_kv_heads} of keys"
    return None
