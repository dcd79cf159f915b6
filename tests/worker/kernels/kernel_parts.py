"""Random decoders, caches and rows for kernel tests, without transformers."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinWeights
from swiftbatch.worker.forward.forward_interface import SparseRows, partial_rows
from swiftbatch.worker.forward.tile_packing import SequenceRows, max_tree_depth, tree_rows
from swiftbatch.worker.kernels.compressed_weights import PoolWeights, StreamWeights
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, LayerWeights
from swiftbatch.worker.kernels.kernel_sizes import CompressedSizes, IndexerSizes, MLASizes, Pools, StreamSizes
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK
from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.native_library import runnable_variants
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.rope_scaling import QueryGrowth, Rotary, default_frequencies
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import ScannedKeys
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.kernels.expert_parts import EXPERT_SHAPES, LATENT, UNGATED, ExpertShape, random_experts
from tests.worker.kv.cache_parts import everything_of

VARIANTS = runnable_variants()
F32_VARIANTS = [name for name in VARIANTS if not name.endswith("bf16")]
needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no kernels were compiled: no C compiler at install")
BF16, FLOAT32 = torch.bfloat16, torch.float32
MAX_LENGTH = 4500


@dataclass(frozen=True)
class Shape:
    """A kind of decoder, as far as the kernels distinguish."""

    head_dim: int = 64
    num_kv_heads: int = 1
    group: int = 2
    hidden: int = 48  # no multiple of the 32 of bf16 products
    intermediate: int = 80
    vocab: int = 100  # no multiple of 16
    has_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = True
    dtype: torch.dtype = BF16
    is_scaled: bool = False  # embeddings, residuals and logits; its second layer rotates nothing
    windows: tuple[int | None, int | None] = (None, None)  # of its layers
    has_other_angles: bool = False  # its first layer
    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    norm_form: NormForm = NormForm.TWICE
    activation: Activation = Activation.SILU
    has_gates: bool = True
    joins_heads: bool = False
    norms_after_rope: bool = False
    is_parallel: bool = False
    rounds_angles: bool = True
    qk_norms_differ: bool = False
    caps: tuple[float, float] = (0.0, 0.0)  # of scores and of logits
    growth: QueryGrowth | None = None
    experts: ExpertShape | None = None  # only in its second layer, whose heads then also have sinks
    latent: MLASizes | None = None  # a cache then has one head, and `group` counts query heads


BEHIND = ("output_norm", "down_norm")
JOINED = Shape(
    num_kv_heads=2,
    has_qk_norm=True,
    joins_heads=True,
    norms=BEHIND,
    norm_form=NormForm.ONCE,
    rounds_angles=False,
)
SCALED_BY_WIDTH = Shape(norm_form=NormForm.ONE_MORE, activation=Activation.GELU_TANH, is_scaled=True, head_dim=256)
CAPPED = Shape(
    norms=("input_norm", "mlp_norm", *BEHIND),
    norm_form=NormForm.ONE_MORE,
    activation=Activation.GELU_TANH,
    windows=(40, None),
    caps=(3.0, 20.0),
)
DIFFERING = Shape(
    num_kv_heads=2,
    group=3,
    norms=("input_norm",),
    norm_form=NormForm.CENTRED,
    is_parallel=True,
    has_qk_norm=True,
    qk_norms_differ=True,
)
SHIFTED = Shape(
    norm_form=NormForm.SHIFTED, activation=Activation.GELU_TANH, has_gates=False, has_bias=True, dtype=FLOAT32
)
BENT = Shape(activation=Activation.XIELU, has_gates=False, has_qk_norm=True, dtype=FLOAT32)
GROWING = Shape(growth=QueryGrowth(0.1, 50))
OTHER_FORMS = {  # by what has them
    "glm4": Shape(norms=("input_norm", "mlp_norm", *BEHIND)),
    "olmo2": JOINED,
    "olmo2 in float32": dataclasses.replace(JOINED, dtype=FLOAT32),
    "exaone4": Shape(has_qk_norm=True, norms=BEHIND, dtype=FLOAT32),
    "gemma": SCALED_BY_WIDTH,
    "gemma in float32": dataclasses.replace(SCALED_BY_WIDTH, dtype=FLOAT32),
    "cohere": Shape(norms=("input_norm",), norm_form=NormForm.CENTRED, is_parallel=True),
    "cohere in float32": Shape(norms=("input_norm",), norm_form=NormForm.CENTRED, is_parallel=True, dtype=FLOAT32),
    "hunyuan": Shape(head_dim=80, group=3, has_qk_norm=True, norms_after_rope=True),
    "hunyuan in float32": Shape(has_qk_norm=True, norms_after_rope=True, dtype=FLOAT32),
    "gemma2": CAPPED,
    "gemma2 in float32": dataclasses.replace(CAPPED, dtype=FLOAT32),
    "cohere with norms of heads": DIFFERING,
    "starcoder2 in float32": SHIFTED,
    "apertus in float32": BENT,
    "ministral3": GROWING,
    "arcee": Shape(activation=Activation.RELU2, has_gates=False, has_bias=True),
    "arcee in float32": Shape(activation=Activation.RELU2, has_gates=False, dtype=FLOAT32),
}
WITH_EXPERTS = {name: Shape(experts=experts) for name, experts in EXPERT_SHAPES.items()}
WITH_EXPERTS |= {
    f"{name} in float32": Shape(experts=EXPERT_SHAPES[name], dtype=FLOAT32) for name in ("glm4_moe", "gpt_oss")
}
WITH_EXPERTS |= {
    "experts without gates": Shape(experts=UNGATED, has_gates=False, activation=Activation.RELU2),
    "latent experts": Shape(experts=LATENT, has_gates=False, activation=Activation.RELU2, dtype=FLOAT32),
}
SHAPES = (
    Shape(),
    Shape(num_kv_heads=2, group=1, has_bias=True, is_tied=False, dtype=FLOAT32),
    Shape(head_dim=96, group=3, has_qk_norm=True, dtype=FLOAT32),
    Shape(head_dim=128, num_kv_heads=2, group=4, hidden=64, vocab=64, is_tied=False),
    Shape(head_dim=80, group=8, has_bias=True, has_qk_norm=True),
    Shape(is_scaled=True),
    Shape(num_kv_heads=2, is_scaled=True, has_qk_norm=True, dtype=FLOAT32),
    *OTHER_FORMS.values(),
    Shape(windows=(40, None), has_other_angles=True),
    Shape(num_kv_heads=2, group=3, dtype=FLOAT32, windows=(300, 2100)),
    *WITH_EXPERTS.values(),
)

LATENTS = (  # more heads share a vector than are computed together, and widths that fit no bf16 products
    Shape(head_dim=64, group=20, latent=MLASizes(48, 0, 32, 16, 16)),
    Shape(head_dim=112, group=3, latent=MLASizes(80, 48, 16, 32, 48), dtype=FLOAT32),
)
INDEXED = (  # fewer keys than most texts have, and a second layer that shares the first one's choice
    Shape(head_dim=112, group=20, latent=MLASizes(48, 32, 32, 16, 16, IndexerSizes(6, 48, 100))),
    Shape(head_dim=144, group=3, latent=MLASizes(80, 48, 16, 16, 48, IndexerSizes(17, 48, 100)), dtype=FLOAT32),
)
COMPRESSED = (  # pooled keys of 4 and of 100 positions, and three streams; widths that fit no bf16 products
    Shape(
        head_dim=80,
        group=20,
        windows=(40, 100),
        has_other_angles=True,
        latent=CompressedSizes(80, 32, 48, 32, 80, IndexerSizes(6, 48, 20), output_groups=4, output_rank=48),
    ),
    Shape(
        group=4,
        windows=(130, 7),
        dtype=FLOAT32,
        latent=CompressedSizes(64, 48, 48, 16, 64, IndexerSizes(17, 48, 70), output_groups=2, output_rank=32),
    ),
)
POOLS, STREAMS = (Pools(4, 2), Pools(100, 1)), StreamSizes(3, 5, 1e-6)


def random_weights(shape: Shape) -> DecoderWeights:
    """Make the same weights in a new list, because a decoder empties it."""
    weights = _random_weights(shape)
    return dataclasses.replace(weights, layers=[*weights.layers])


@functools.cache
def _random_weights(shape: Shape) -> DecoderWeights:
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(shape.dtype)

    def linear(columns: int, depth: int) -> Linear:
        return Linear(normal(columns, depth, scale=depth**-0.5), normal(columns) if shape.has_bias else None)

    num_heads = shape.num_kv_heads * shape.group
    counts = (2, shape.hidden, num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate, shape.vocab)
    scales = (12.0, 0.22, 1 / 16) if shape.is_scaled else (1.0, 1.0, 1.0)
    forms = (shape.norm_form, shape.activation, shape.has_gates, shape.joins_heads, shape.norms_after_rope)
    forms = (*forms, shape.is_parallel)
    forms = (*forms, shape.qk_norms_differ, *shape.caps)
    streams = STREAMS if isinstance(shape.latent, CompressedSizes) else None
    sizes = DecoderSizes(
        *counts, 1e-5, shape.head_dim**-0.5, shape.dtype, *scales, *forms, latent=shape.latent, streams=streams
    )
    embedding = normal(shape.vocab, shape.hidden)
    head = Linear(embedding if shape.is_tied else normal(shape.vocab, shape.hidden))
    rope_dim = shape.head_dim if shape.latent is None else shape.latent.rope_dim
    frequencies = default_frequencies(10000.0, rope_dim)
    rotary = Rotary(frequencies, is_rounded=shape.rounds_angles, growth=shape.growth)
    layers = [_random_layer(shape, number, normal, linear) for number in range(2)]
    of_head = None if streams is None else random_streams(shape, normal, is_head=True)
    return DecoderWeights(sizes, embedding, layers, normal(sizes.norm_width), head, rotary, head_streams=of_head)


def random_streams(shape: Shape, normal: Callable[..., Tensor], is_head: bool = False) -> StreamWeights:
    columns, width = STREAMS.count * (1 if is_head else 2 + STREAMS.count), STREAMS.count * shape.hidden
    sizes = ((columns, width), (columns,), (1 if is_head else 3,))
    return StreamWeights(*(normal(*size, scale=size[-1] ** -0.5).float() for size in sizes))


def _compressed_attention(
    sizes: CompressedSizes,
    shape: Shape,
    pools: Pools,
    normal: Callable[..., Tensor],
    linear: Callable[[int, int], Linear],
) -> dict[str, Any]:
    width, indexer = shape.group * sizes.rank, sizes.indexer
    assert indexer is not None

    def pool(dim: int) -> PoolWeights:
        columns = pools.series * dim
        bias = normal(pools.ratio, columns).float()
        return PoolWeights(linear(columns, shape.hidden), linear(columns, shape.hidden), bias, normal(dim))

    found: dict[str, Any] = {
        "query_down": linear(sizes.query_rank, shape.hidden),
        "query": linear(width, sizes.query_rank),
        "key": linear(sizes.rank, shape.hidden),
        "value": None,
        "output_down": linear(sizes.output_groups * sizes.output_rank, width // sizes.output_groups),
        "output": linear(shape.hidden, sizes.output_groups * sizes.output_rank),
        "pools": pools,
        "pool": pool(sizes.rank),
        "attention_streams": random_streams(shape, normal),
        "mlp_streams": random_streams(shape, normal),
    }
    if pools.series == 1:
        return found
    of_indexer = linear(indexer.num_heads * indexer.dim, sizes.query_rank), linear(indexer.num_heads, shape.hidden)
    return found | {"index_pool": pool(indexer.dim), "index_query": of_indexer[0], "index_weight": of_indexer[1]}


@functools.cache
def other_rotation(head_dim: int) -> Rotary:
    return Rotary(default_frequencies(1e6, head_dim))


def _random_layer(
    shape: Shape, number: int, normal: Callable[..., Tensor], linear: Callable[[int, int], Linear]
) -> LayerWeights:
    query, key = shape.num_kv_heads * shape.group * shape.head_dim, shape.num_kv_heads * shape.head_dim

    is_compressed = isinstance(shape.latent, CompressedSizes)
    rope_dim = shape.head_dim if shape.latent is None else shape.latent.rope_dim

    def norm(name: str) -> Tensor | None:
        width = shape.hidden * (2 if shape.norm_form == NormForm.SHIFTED else 1)
        return normal(width) if name in shape.norms else None

    def qk_norm(width: int) -> Tensor | None:
        has_all = shape.joins_heads or shape.qk_norms_differ
        return normal(width if has_all else shape.head_dim) if shape.has_qk_norm else None

    experts = None if number == 0 else shape.experts
    width = shape.intermediate if experts is None else experts.shared_intermediate

    def attention() -> dict[str, Any]:
        if isinstance(shape.latent, CompressedSizes):
            return _compressed_attention(shape.latent, shape, POOLS[number], normal, linear)
        if shape.latent is not None:
            of_latents = _latent_attention(shape.latent, shape, normal, linear)
            return of_latents | (_indexer(shape.latent, shape, normal, linear) if number == 0 else {})
        widths = {"query": (query, shape.hidden), "key": (key, shape.hidden), "value": (key, shape.hidden)}
        return {role: linear(*each) for role, each in (widths | {"output": (shape.hidden, query)}).items()}

    def qk_norms() -> dict[str, Tensor | None]:
        if shape.latent is not None:
            of_queries = normal(shape.latent.query_rank) if shape.latent.query_rank else None
            return {"query_norm": of_queries, "key_norm": normal(shape.latent.rank)}
        return {"query_norm": qk_norm(query), "key_norm": qk_norm(key)}

    return LayerWeights(
        input_norm=norm("input_norm"),
        **attention(),
        mlp_norm=norm("mlp_norm"),
        gate=linear(width, shape.hidden) if shape.has_gates and width else None,
        up=linear(width, shape.hidden) if width else None,
        down=linear(shape.hidden, width) if width else None,
        **qk_norms(),
        output_norm=norm("output_norm"),
        down_norm=norm("down_norm"),
        is_nope=shape.is_scaled and number == 1,
        window=shape.windows[number],
        curve=torch.tensor([0.9, 1.2, 0.5, -1e-6]) if shape.activation == Activation.XIELU else None,
        rotary=other_rotation(rope_dim) if shape.has_other_angles and number == 0 else None,
        experts=None if experts is None else random_experts(experts, shape.hidden, normal),
        sinks=normal(shape.num_kv_heads * shape.group).float() if experts is not None or is_compressed else None,
    )


def _latent_attention(
    latent: MLASizes, shape: Shape, normal: Callable[..., Tensor], linear: Callable[[int, int], Linear]
) -> dict[str, Any]:
    has_vectors = latent.query_rank > 0
    return {
        "query_down": linear(latent.query_rank, shape.hidden) if has_vectors else None,
        "query": linear(shape.group * latent.query_dim, latent.query_rank or shape.hidden),
        "key": linear(latent.key_dim, shape.hidden),
        "value": None,
        "key_up": linear(shape.group * latent.rank, latent.nope_dim),
        "value_up": linear(shape.group * latent.value_dim, latent.rank),
        "output": linear(shape.hidden, shape.group * latent.value_dim),
    }


def _indexer(
    latent: MLASizes, shape: Shape, normal: Callable[..., Tensor], linear: Callable[[int, int], Linear]
) -> dict[str, Any]:
    if (indexer := latent.indexer) is None:
        return {}
    return {
        "index_query": linear(indexer.num_heads * indexer.dim, latent.query_rank),
        "index_key": linear(indexer.dim, shape.hidden),
        "index_weight": linear(indexer.num_heads, shape.hidden),
        "index_norm": normal(2 * indexer.dim),
    }


def random_griffin(shape: Shape, num_parts: int, expansion: int) -> GriffinWeights:
    """The draft model's layer is `random_weights`' first; the head needs a second fusion."""
    generator, hidden = torch.Generator().manual_seed(3), shape.hidden

    def linear(*sizes: int) -> Linear:
        weight = torch.randn(sizes, generator=generator) * (sizes[-1] ** -0.5 if len(sizes) > 1 else 1.0)
        return Linear(weight.to(shape.dtype), torch.randn(sizes[:1], generator=generator).to(shape.dtype))

    whole, width = random_weights(shape), num_parts * hidden
    return GriffinWeights(
        dataclasses.replace(whole.sizes, num_layers=1),
        whole.layers[0],
        whole.rotary,
        fuse=linear(hidden, 2 * hidden),
        parts=[(source, linear(hidden)) for source in ("fused", "token")[:num_parts]],
        expand=linear(expansion, width) if expansion else None,
        contract=linear(hidden, expansion or width) if num_parts else None,
        predict=linear(hidden, hidden) if num_parts else None,
        regress=linear(hidden, hidden) if num_parts else None,
    )


@functools.cache
def native(shape: Shape, variant: str, num_threads: int = 1) -> NativeDecoder:
    return NativeDecoder(random_weights(shape), num_threads, variant)


@functools.cache
def noise(shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    sizes = (*cache_shape(shape).rows_size, MAX_LENGTH, shape.head_dim)
    return torch.randn(sizes, generator=generator).to(shape.dtype)


def cache_shape(shape: Shape) -> CacheShape:
    num_parts = 2 if shape.latent is None else 1
    counts = (2, shape.num_kv_heads, shape.head_dim)
    if isinstance(shape.latent, CompressedSizes):
        kept = [each for pools in POOLS for each in shape.latent.kept(1, pools)]
        stripes = tuple(each.stripes for each in kept)
        counts = (len(kept), *counts[1:])
        return CacheShape(*counts, shape.dtype, torch.device("cpu"), num_parts=num_parts, stripes=stripes)
    return CacheShape(*counts, shape.dtype, torch.device("cpu"), num_parts=num_parts)


def random_cache(shape: Shape, length: int, room: int = 64) -> FullKVCache:
    """Make `length` committed positions of noise, and NaN elsewhere."""
    cache = FullKVCache(cache_shape(shape), length + room)
    cache.rows.buffer[..., :length, :] = noise(shape)[..., :length, :]
    cache.rows.buffer[..., length:, :] = float("nan")
    cache.advance(length)
    return cache


def coded_cache(shape: Shape, kv_dtype: KVDtype, length: int, room: int = 64) -> FullKVCache:
    """Make `length` positions of coded noise."""
    cache = FullKVCache(dataclasses.replace(cache_shape(shape), kv_dtype=kv_dtype), length + room)
    cache.clear()
    if length:
        cache.rows.buffer[..., :length, :] = cache.shape.kept(noise(shape)[..., :length, :])
    cache.advance(length)
    return cache


def random_tree(numbers: random.Random, num_nodes: int, length: int, vocab: int) -> DraftTree:
    """Make a tree after position `length` inside its block."""
    parents, depths = [], {ROOT: 0}
    for node in range(num_nodes):
        above = [each for each, depth in depths.items() if depth < max_tree_depth(length)]
        if not above:
            break
        parents.append(numbers.choice(above))
        depths[node] = depths[parents[-1]] + 1
    return DraftTree([numbers.randrange(vocab) for _ in parents], parents)


def tree_of_few_tokens(chance: random.Random, most_nodes: int, vocab: int) -> DraftTree:
    """Draws often match among few tokens; siblings differ."""
    tree = DraftTree()
    for _ in range(chance.randrange(most_nodes)):
        parent, token_id = chance.randrange(ROOT, len(tree)), chance.randrange(vocab)
        if token_id not in tree.children().get(parent, {}):
            tree.token_ids.append(token_id)
            tree.parents.append(parent)
    return tree


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def decoded_alone(decoder: NativeDecoder, cache: FullKVCache, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the last hidden state and logits."""
    for token_id in token_ids:
        hidden, logits = decoder.forward([tree_rows(cache, token_id, DraftTree())])
        cache.advance(1)
    assert hidden is not None
    assert logits is not None
    return hidden[0], logits[0]


def whole(outputs: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    hidden, logits = outputs
    assert hidden is not None
    assert logits is not None
    return hidden, logits


def chain(cache: FullKVCache, token_ids: list[int]) -> SequenceRows:
    return tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:]))


def scanned_noise(shape: Shape, num_chunks: int, num_best: int, first: int = 16) -> ScannedKeys:
    length = first + num_chunks * SCAN_CHUNK + 70
    cache = random_cache(shape, length)
    keys = ScannedKeys([cache.stored(layer) for layer in range(2)], first, length, num_best)
    keys.extend(length)
    return keys


def random_partial_rows(numbers: random.Random, shape: Shape, num_entries: int, num_nodes: int) -> SparseRows:
    """Make rows after `num_entries`, some with biases."""
    bias = np.array([numbers.uniform(-2, 4) for _ in range(numbers.randrange(num_entries + 1))], dtype=np.float32)
    cache = everything_of(cache_shape(shape), random_cache(shape, num_entries), bias if len(bias) else None)
    tree = random_tree(numbers, num_nodes, 0, shape.vocab)
    return partial_rows(cache, numbers.randrange(shape.vocab), num_entries + numbers.randrange(5000), tree)
