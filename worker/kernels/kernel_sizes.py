"""Sizes that kernels, caches, samplers and memory plans share, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 64  # the prefix that rows share ends at a multiple of this many positions
TILE_ROWS = 32  # rows of a forward in `transformers`' layers, and of a panel of the C kernels
MIN_ROWS = 2  # a single row may take another kernel (matrix times vector), with other bits
FEWEST_COLUMNS = 64  # with fewer columns, bits of torch's bf16 products depend on the batch (measured)
NUM_ROWS = 64  # rows to which a forward on a GPU is padded by default
ROW_CHOICES = (NUM_ROWS, 128, 256)  # whole tiles of every kernel
FEW_ROWS = 32  # cost less only where packed weights, of which little is read, would wait for products
HEAD_BLOCKS = 8  # the fewest of a split of a GPU's attention: a split of one block costs more than it saves
LATENT_BLOCKS = 4  # the same for latent vectors, whose blocks have twice the bytes of a head's
MOST_SPLITS = 64  # of a prefix; longer ones have longer splits
MOST_SLOTS = 32  # up to here twice the jobs give a fifth more tokens (docs/speed.md), but each job takes longer
LANES = 16  # numbers that the kernels multiply at once, so all widths are multiples of it
BLOCK_DEPTH = 128  # numbers along the depth that a GPU's matrix products read per step
MOST_PARTS = 8  # of a product's depth, so that a product with few columns occupies every multiprocessor
KV_SCALE_BYTES = 4  # a scale follows the codes of an 8-bit key or value
CUDA_SCALE_BYTES = 16  # the scale and its padding, which aligns a GPU's rows to 16 bytes
HEAD_DIMS = range(64, 257, LANES)
MOST_HEAD_DIM = 512  # of layers with heads of their own, as in source/api.h
WIDE_STRIPES = 2  # heads of a cache that a layer's own head takes on a GPU
MOST_POOLED = 256  # positions of a pooled key, as in source/compressed.h
MOST_STREAMS = 16  # as in source/api.h
COUNTS = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")  # of a decoder
MOST_LATENT, MOST_LATENT_HEADS = 16384, 1024  # largest size of a latent vector, and most heads that share it
MOST_CHOSEN_KEYS = 1 << 20  # keys that an indexer chooses for a row


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of indexers, which choose the keys that a row attends to."""

    num_heads: int
    dim: int  # of each head of queries, and of the key that all heads share
    num_chosen: int  # most keys of a row


@dataclass(frozen=True)
class BlockChoice:
    """Blocks of keys that a row sees with each head of keys: its own, and the best others by an index key each."""

    size: int
    num_chosen: int  # of a row

    @property
    def num_keys(self) -> int:
        return self.size * self.num_chosen

    def most_attended(self, capacity: int) -> int:
        """Return the most keys of a prefix that a row attends to in a cache of `capacity` positions."""
        return min(capacity, self.num_keys)

    def fault(self) -> str | None:
        """Return why the kernels do not support them, or None if they do."""
        if self.size % BLOCK or self.num_keys > MOST_CHOSEN_KEYS:
            return (
                f"found indexers that choose {self.num_chosen:,} blocks of {self.size:,} keys, expected blocks of a "
                f"multiple of {BLOCK} keys, and at most {MOST_CHOSEN_KEYS:,} keys"
            )
        return None


@dataclass(frozen=True)
class LayerHeads:
    """Heads of keys and values in a layer; those of other layers may be a fraction as wide.

    With `blocks`, an index key takes one more head of a cache.
    """

    num_kv_heads: int
    head_dim: int
    blocks: BlockChoice | None = None

    def num_stripes(self, head_dim: int) -> int:
        """Return how many heads of a cache, `head_dim` wide, the layer takes."""
        return self.num_kv_heads * self.head_dim // head_dim + (self.blocks is not None)

    def fault(self, num_heads: int, head_dim: int) -> str | None:
        """Return why the kernels do not support them beside heads of `head_dim`, or None if they do."""
        if self.head_dim % head_dim or not head_dim <= self.head_dim <= MOST_HEAD_DIM:
            return f"found heads of {self.head_dim} beside {head_dim}, expected a multiple of it up to {MOST_HEAD_DIM}"
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            return f"found {num_heads} heads for {self.num_kv_heads} of keys"
        return None if self.blocks is None else self.blocks.fault()

    def gpu_fault(self, head_dim: int) -> str | None:
        """Return why the kernels for GPUs do not support them beside heads of `head_dim`, or None if they do."""
        if self.blocks is not None:
            is_power = self.num_kv_heads & (self.num_kv_heads - 1) == 0
            return None if is_power else f"found indexers for {self.num_kv_heads} heads of keys, expected a power of 2"
        is_wide = self.head_dim == WIDE_STRIPES * head_dim and head_dim & (head_dim - 1) == 0
        if self.head_dim != head_dim and not is_wide:
            return f"found heads of {self.head_dim} beside {head_dim}, expected twice as many dimensions, a power of 2"
        return None


@dataclass(frozen=True)
class MLASizes:
    """Sizes of attention whose cache has a latent vector per position, followed by the rotary part of the keys.

    The indexer's key follows if the model has indexers.
    """

    rank: int
    query_rank: int  # 0: queries have no latent vector of their own
    nope_dim: int  # dimensions of a head's queries and keys that are not rotated
    rope_dim: int
    value_dim: int
    indexer: IndexerSizes | None = None

    @property
    def key_dim(self) -> int:
        """Return the numbers of an entry that scores multiply."""
        return self.rank + self.rope_dim

    @property
    def entry_dim(self) -> int:
        """Return the size of a cache entry: the numbers per position and layer."""
        return self.key_dim + (0 if self.indexer is None else self.indexer.dim)

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def most_attended(self, capacity: int) -> int:
        """Return the most keys that a row attends to in a cache of `capacity` positions."""
        return capacity if self.indexer is None else min(capacity, self.indexer.num_chosen)


class CacheLayer(NamedTuple):
    """Rows of a layer in a cache: the positions that a later row needs, None for all, and the heads that they take."""

    window: int | None
    stripes: int


@dataclass(frozen=True)
class Pools:
    """Pooled keys of a layer: one for each `ratio` positions."""

    ratio: int
    series: int  # two if a pooled key has positions before these, too; then an indexer chooses among pooled keys


@dataclass(frozen=True)
class CompressedSizes(MLASizes):
    """Sizes of attention whose heads share one key of `rank` per position, which is its value, too.

    Some layers also have pooled keys: source/compressed.h.
    """

    output_groups: int = 1  # of heads that are projected together in front of the output
    output_rank: int = 0  # numbers of each group after that

    @property
    def key_dim(self) -> int:
        return self.rank

    @property
    def entry_dim(self) -> int:
        return self.rank

    def kept(self, window: int, pools: Pools | None) -> tuple[CacheLayer, ...]:
        """Return a layer's rows: keys and what pools read of a position, then pooled keys."""
        if pools is None:
            return (CacheLayer(window, 1),)
        dims = [self.rank, *([self.indexer.dim] if pools.series > 1 and self.indexer is not None else [])]
        read = sum(-(-2 * pools.series * dim // self.rank) for dim in dims)
        return CacheLayer(max(window, pools.series * pools.ratio), 1 + read), CacheLayer(None, pools.series)


@dataclass(frozen=True)
class StreamSizes:
    """The streams of a row's state (hyper-connections): source/streams.h."""

    count: int
    num_sinkhorn: int
    epsilon: float


def most_slots(num_rows: int) -> int:
    """Return the largest number of jobs that a GPU runs at the same time."""
    return MOST_SLOTS if num_rows == NUM_ROWS else num_rows


def narrower_rows(num_rows: int, has_few: bool) -> tuple[int, ...]:
    """Return the smaller numbers of rows of a run's forwards, ascending; `has_few` lets `FEW_ROWS` be among them."""
    return tuple(each for each in (*([FEW_ROWS] if has_few else []), *ROW_CHOICES) if each < num_rows)


def num_splits(capacity: int, least_blocks: int) -> int:
    """Return the most splits of a prefix in a cache of `capacity` positions."""
    return min(MOST_SPLITS, -(-capacity // (BLOCK * least_blocks)))


def parts_of_depth(depth: int) -> int:
    """Return the parts of a product whose result is added to the residual; its bits depend on them."""
    return min(MOST_PARTS, -(-depth // BLOCK_DEPTH))


def depth_of_part(depth: int) -> int:
    """Return the depth of each part but the last ones: whole blocks."""
    num_blocks = -(-depth // BLOCK_DEPTH)
    return -(-num_blocks // parts_of_depth(depth)) * BLOCK_DEPTH


def fills_blocks(group: int, depth: int) -> bool:
    """Return whether groups of packed weights are aligned with the depth blocks of a GPU's matrix products."""
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
    latent: MLASizes | None,
) -> str | None:
    """Return which size of a dense decoder the kernels do not support, or None if they support all."""
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
    if (indexer := latent.indexer) is not None:
        if not latent.query_rank:
            return "found indexers without a latent vector of queries (q_lora_rank), which they read"
        if indexer.num_heads > MOST_LATENT_HEADS or indexer.num_chosen > MOST_CHOSEN_KEYS:
            return (
                f"found indexers of {indexer.num_heads} heads that choose {indexer.num_chosen:,} keys, expected at "
                f"most {MOST_LATENT_HEADS:,} heads and {MOST_CHOSEN_KEYS:,} keys"
            )
        if indexer.dim % LANES or not latent.rope_dim <= indexer.dim <= MOST_LATENT:
            return f"found indexers of width {indexer.dim}, expected a multiple of {LANES}, {latent.rope_dim} or more"
    if isinstance(latent, CompressedSizes) and (fault := _compressed_fault(latent, num_heads)):
        return fault
    if (num_kv_heads, head_dim) != (1, latent.entry_dim):
        return f"found {num_kv_heads} heads of {head_dim} in a cache, expected one of {latent.entry_dim}"
    return None


def _compressed_fault(sizes: CompressedSizes, num_heads: int) -> str | None:
    """Return which size of compressed attention the kernels do not support."""
    if sizes.rank > MOST_HEAD_DIM or sizes.query_dim != sizes.rank or not sizes.query_rank or sizes.indexer is None:
        return f"found heads of {sizes.rank} beside {sizes.query_rank}, expected at most {MOST_HEAD_DIM}"
    if sizes.indexer.dim > sizes.rank:
        return f"found indexers of width {sizes.indexer.dim}, expected at most that of heads, {sizes.rank}"
    if sizes.output_groups < 1 or num_heads % sizes.output_groups or sizes.output_rank % LANES or not sizes.output_rank:
        return f"found {sizes.output_groups} groups of {num_heads} heads, of {sizes.output_rank} numbers each"
    return None
