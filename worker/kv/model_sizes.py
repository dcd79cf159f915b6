"""Sizes that decide a model's GPU memory, also of quantized weights, without torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, CUDA_SCALE_BYTES, LayerHeads, MLASizes, fills_blocks
from swiftbatch.worker.kernels.layer_specs import slot_bytes
from swiftbatch.worker.kernels.rank_shares import Rank, columns_of
from swiftbatch.worker.kv.kv_capacity import ITEM_SIZES, MAX_TREE_NODES, HeldPositions, bytes_per_position
from swiftbatch.worker.model.architectures.attention_layers import INDEX_LINEARS, UP, Windows
from swiftbatch.worker.model.architectures.catalogue import recurrent_shape
from swiftbatch.worker.model.architectures.moe_layers import ROLES, MoEConfig
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentConfig, RecurrentShape
from swiftbatch.worker.model.architectures.spec import PLE_LINEARS, PLE_OF_ALL, PLE_TABLE
from swiftbatch.worker.model.decoder_config import DecoderConfig, kernel_config
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.model_files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, is_of_text

PRODUCT = re.compile(r"^(model\.layers\.\d+\.(?:self_attn|mlp)\.)(\w+)_proj(?:_with_mqa)?\.weight$")
# maps the parts of a stacked matrix to its name
STACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
STACKED |= {"q_a": "qkv", "kv_a": "qkv"}  # these lead into latent vectors
STACKED |= {"index_q": "qkv", "index_k": "qkv"}  # of indexers of blocks
OF_HEADS = "kv_b"  # is never packed
FACTOR_BYTES = 4


@dataclass(frozen=True)
class PackedPart:
    """Packed weights on a device: codes, with a float32 scale and perhaps an offset per group.

    A depth is padded to whole blocks. Scales that fit bfloat16 may take less.
    """

    num_parameters: int
    bits: int
    group_size: int
    has_offsets: bool = False
    depth: int = BLOCK_DEPTH

    @property
    def num_bytes(self) -> int:
        padded = -(-self.depth // BLOCK_DEPTH) * BLOCK_DEPTH
        num_factors = (1 if self.group_size >= self.depth else padded // self.group_size) * (1 + self.has_offsets)
        return self.num_parameters // self.depth * (padded * self.bits // 8 + num_factors * FACTOR_BYTES)


def packed_parts(
    heads: Mapping[str, StoredTensor],
    config: dict[str, Any],
    experts: MoEConfig | None = None,
    mixer: RecurrentConfig | None = None,
) -> tuple[PackedPart, ...]:
    """Return the stacked weight matrices whose parts share one packed form, as `stacked_weights` stores them.

    If a matrix's packed form can be told only from its values, the matrix counts as dequantized.
    """
    alone = {EMBEDDING if config.get("tie_word_embeddings") else HEAD, f"{PLE_OF_ALL['ple_projection']}.weight"}
    products = defaultdict[str, list[StoredTensor]](list)
    named = [] if experts is None else list(_products_of(experts))
    named += [] if mixer is None else list(_products_of_mixer(mixer))
    named += [(_in_a_layer(f"{name}.weight"), role) for role, name in PLE_LINEARS.items()]
    named += [
        (_in_a_layer(f"{name}.weight"), "index_query" if role == "index_query" else "index_narrow")
        for role, name in INDEX_LINEARS.items()
    ]
    for name, head in heads.items():
        if of_experts := [f"{layer[1]}{product}" for each, product in named if (layer := each.match(name)) is not None]:
            products[of_experts[0]].append(head)
        elif (found := PRODUCT.match(name)) is not None and found[2] != OF_HEADS:
            products[f"{found[1]}{STACKED.get(found[2], found[2])}"].append(head)
        elif name in alone:
            products[name].append(head)
    return tuple(part for parts in products.values() if (part := _part(parts)) is not None)


def _products_of(experts: MoEConfig) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield patterns of the names of experts' and shared matrices, each with its product."""
    names = experts.names
    found = {} if names.fused is None else {each: each for each in (names.fused.gate_up, names.fused.down)}
    found |= {name: f"experts.{STACKED.get(role, role)}" for role, name in (names.each or {}).items()}
    found |= {f"{name}.weight": f"shared.{STACKED.get(role, role)}" for role, name in (names.shared or {}).items()}
    found |= {f"{name}.weight": name for name in names.latent or ()}
    return ((_in_a_layer(name), product) for name, product in found.items())


def _products_of_mixer(mixer: RecurrentConfig) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield patterns of the names of matrices around states, each with its product."""
    for name, roles in mixer.spec.linears.items():
        product = "output" if roles == ("output",) else "heads" if roles[0] in ("betas", "steps") else "channels"
        yield _in_a_layer(f"{mixer.spec.part}.{name}.weight"), f"mixer.{product}"


def _in_a_layer(name: str) -> re.Pattern[str]:
    return re.compile(r"^(model\.layers\.\d+\.)" + re.escape(name).replace(r"\{\}", r"\d+") + "$")


def num_floats(heads: Mapping[str, StoredTensor], experts: MoEConfig, sinks: str | None) -> int:
    """Count the elements of routers, their scales and sinks, which are float32 in every dtype."""
    own = experts.names
    names = (own.router, own.router_bias, own.choice_bias, own.shared_gate, *own.scales.values(), sinks)
    patterns = [_in_a_layer(name) for name in names if name is not None]
    return sum(head.num_numbers for name, head in heads.items() if any(each.match(name) for each in patterns))


def num_beside(heads: Mapping[str, StoredTensor], config: dict[str, Any]) -> int:
    """Count the elements of a packed tied head, which is stored in addition to the plain embedding."""
    embedding = heads.get(EMBEDDING)
    if embedding is None or embedding.form is None or not config.get("tie_word_embeddings"):
        return 0
    return embedding.num_numbers


def _part(heads: list[StoredTensor]) -> PackedPart | None:
    kinds = {head.form for head in heads}
    kind = kinds.pop()
    if kinds or kind is None or not fills_blocks(kind.group, heads[0].shape[-1]):
        return None
    num_parameters, depth = sum(head.num_numbers for head in heads), heads[0].shape[-1]
    return PackedPart(num_parameters, kind.bits, kind.group, kind.has_offsets, depth)


# Sizes that decide how much GPU memory a model takes, known before anything is loaded.


PACKED_DTYPE = "bfloat16"  # the only dtype whose kernels multiply packed weights


FLOAT_BYTES = 4


@dataclass(frozen=True)
class ExpertSizes:
    """Experts of a layer, and a row's choice among them."""

    num_experts: int
    num_chosen: int
    width: int
    num_floats: int  # counts numbers that are float32 in every dtype


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder in the dtype of the run."""

    num_parameters: int
    bytes_per_position: int  # has keys and values of all layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    item_size: int
    packed: tuple[PackedPart, ...] = ()  # the other parameters are in the dtype
    recurrent: RecurrentShape | None = None  # None: no layer has a state
    kv_dtype: KVDtype | None = None  # None: full caches use the dtype
    experts: ExpertSizes | None = None  # None: our kernels multiply none
    latent: MLASizes | None = None  # caches then have one head, whose rows are both keys and values
    windows: Windows = ()  # () if none has one, or caches hold more than positions
    held: HeldPositions | None = None  # None: a GPU's caches keep all positions
    num_on_every_gpu: int = 0  # parameters that GPUs do not share
    num_ranks: int = 1  # GPUs that share the rest
    stripes: tuple[int, ...] = ()  # heads of a cache that each layer takes; () if all take `num_kv_heads`
    own_heads: LayerHeads | None = None  # of some layers, other than the rest's; None if all have the same
    narrow_values: int = 0  # width of a head's values; 0: that of its keys
    ple_width: int = 0  # of per-layer embeddings in all layers
    num_half: int = 0  # parameters that take two bytes in every dtype

    @property
    def value_dim(self) -> int:
        return (self.narrow_values or self.widest_dim) if self.latent is None else self.latent.rank

    @property
    def widest_dim(self) -> int:
        return self.head_dim if self.own_heads is None else self.own_heads.head_dim

    @property
    def num_parts(self) -> int:
        return 2 if self.latent is None else 1

    @property
    def state_bytes(self) -> int:
        if self.recurrent is None:
            return 0
        return slot_bytes(self.recurrent, self.recurrent.num_layers, self.item_size, MAX_TREE_NODES + 1)

    @property
    def kept_bytes_per_position(self) -> int:
        if self.kv_dtype is None:
            return self.bytes_per_position
        num_rows = self.bytes_per_position // (self.head_dim * self.item_size)
        return num_rows * (self.head_dim + CUDA_SCALE_BYTES)

    @property
    def window_bytes_per_position(self) -> int:
        """Return the bytes per position of layers with a window, if these layers forget positions."""
        if self.held is None:
            return 0
        counts = self.stripes or (1,) * len(self.windows)
        num_windowed = sum(count for count, size in zip(counts, self.windows, strict=True) if size is not None)
        return self.kept_bytes_per_position // sum(counts) * num_windowed

    def kept_bytes(self, num_positions: int) -> int:
        """Return the bytes of `num_positions`, without forgotten positions."""
        num_bytes = num_positions * self.kept_bytes_per_position
        if self.held is None:
            return num_bytes
        return num_bytes - (num_positions - self.held.of(num_positions)) * self.window_bytes_per_position

    @property
    def weight_bytes(self) -> int:
        num_plain = self.num_parameters - sum(part.num_parameters for part in self.packed)
        num_wider = 0 if self.experts is None else self.experts.num_floats * (FLOAT_BYTES - self.item_size)
        num_wider -= self.num_half * (self.item_size - 2)
        whole = num_plain * self.item_size + num_wider + sum(part.num_bytes for part in self.packed)
        if self.num_ranks == 1:
            return whole
        on_every_gpu = min(whole, self.num_on_every_gpu * self.item_size + num_wider)  # more, where some are packed
        depth = self.intermediate
        widest: float = columns_of(depth, Rank(0, self.num_ranks)).stop / depth if depth else 0.0
        return on_every_gpu + math.ceil((whole - on_every_gpu) * max(widest, 1 / self.num_ranks))

    def of_a_rank(self, num_ranks: int) -> ModelSizes:
        """Return the sizes of what one of several GPUs has."""
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(
            self,
            bytes_per_position=self.bytes_per_position * num_kv_heads // self.num_kv_heads,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=num_kv_heads,
            num_ranks=num_ranks,
        )


def read_sizes(files: ModelFiles, dtype: str) -> ModelSizes | None:
    """Return the sizes of a model folder, or None if the config lacks some of them."""
    config = read_config(files.name, files.path)
    return sizes_of_stored(config, stored_layout(files.name, files.path).heads, dtype)


def sizes_of_stored(config: dict[str, Any], heads: Mapping[str, StoredTensor], dtype: str) -> ModelSizes | None:
    """Return the sizes from stored tensors; an unpacked tied head counts once, as on the device."""
    number = sum(each.num_numbers for name, each in heads.items() if is_of_text(name, config))
    dense = kernel_config(config)
    experts = None if dense is None else dense.experts
    packed = packed_parts(heads, config, experts, None if dense is None else dense.mixer)
    sizes = sizes_of(config, number + num_beside(heads, config), dtype, packed)
    if sizes is None or dense is None:
        return sizes
    table = heads.get(PLE_TABLE)
    num_half = table.num_numbers if table is not None and table.dtype == "BF16" else 0
    sizes = replace(sizes, num_on_every_gpu=number - num_shared(heads, config, dense), num_half=num_half)
    if experts is None:
        return sizes
    routing, floats = experts.routing, num_floats(heads, experts, dense.form.sinks)
    numbers = (routing.num_experts, routing.num_chosen, experts.width, floats)
    return replace(sizes, experts=ExpertSizes(*numbers))


def sizes_of(config: dict[str, Any], number: int, dtype: str, packed: tuple[PackedPart, ...] = ()) -> ModelSizes | None:
    """Return the sizes of a text model, or None if the config lacks some of them.

    `packed` parameters are dequantized in dtypes other than bfloat16.
    """
    num_bytes = bytes_per_position(config, dtype)
    num_heads, hidden, intermediate = (
        config.get(key) for key in ("num_attention_heads", "hidden_size", "intermediate_size")
    )
    if num_bytes is None or not (num_heads and hidden and intermediate):
        return None
    dense = kernel_config(config)
    latent = None if dense is None or dense.latent is None else dense.latent.sizes
    num_kv_heads, head_dim = config.get("num_key_value_heads") or num_heads, config.get("head_dim")
    return ModelSizes(
        num_parameters=number,
        bytes_per_position=num_bytes,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if latent is None else 1,
        head_dim=(head_dim or hidden // num_heads) if latent is None else latent.entry_dim,
        hidden=hidden,
        intermediate=intermediate,
        vocab=config["vocab_size"],
        item_size=ITEM_SIZES[dtype],
        packed=packed if dtype == PACKED_DTYPE else (),
        recurrent=recurrent_shape(config),
        latent=latent,
        windows=() if dense is None or dense.mixer is not None or latent is not None else dense.kept_windows,
        stripes=() if dense is None else dense.stripes,
        own_heads=None if dense is None else dense.own_heads,
        narrow_values=0 if dense is None else dense.value_dim,
        ple_width=0 if dense is None else dense.num_layers * dense.ple_dim,
    )


def num_shared(heads: Mapping[str, StoredTensor], config: dict[str, Any], dense: DecoderConfig) -> int:
    """Count the parameters that several GPUs share: heads, MLPs, experts and the output layer."""
    names, of_heads = set[str](), {"query", "value", "output", "head_gate", UP}
    for number in range(dense.num_layers):
        roles = of_heads if dense.latent is not None else of_heads | {"key"}
        if dense.experts is None or number not in dense.experts.layers:
            roles = roles | set(ROLES)
        names |= {
            f"model.layers.{number}.{name}.weight" for role, name in dense.linears(number).items() if role in roles
        }
    found = sum(head.num_numbers for name, head in heads.items() if name in names or name == HEAD)
    if dense.experts is None:
        return found
    own = dense.experts.names
    patterns = [_in_a_layer(name) for name in (own.each or {}).values()]
    patterns += [] if own.fused is None else [_in_a_layer(each) for each in (own.fused.gate_up, own.fused.down)]
    return found + sum(head.num_numbers for name, head in heads.items() if any(each.match(name) for each in patterns))


def num_parameters(files: list[Path]) -> int:
    return sum(head.num_numbers for file in files for head in heads_in(file).values())
