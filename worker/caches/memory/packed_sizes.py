"""Weights that stay packed on a GPU, told from the heads of a model's files. Without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import fills_blocks
from swiftbatch.worker.model.dense_config import SINKS
from swiftbatch.worker.model.expert_config import ExpertConfig
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.gguf.tensor_types import PACKED, PackedKind
from swiftbatch.worker.model.mixer_forms import MixerConfig
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD

PRODUCT = re.compile(r"^(model\.layers\.\d+\.(?:self_attn|mlp)\.)(\w+)_proj(?:_with_mqa)?\.weight$")
STACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # parts, and the product of them
STACKED |= {"q_a": "qkv", "kv_a": "qkv"}  # to latent vectors
OF_HEADS = "kv_b"  # from a latent vector to each head's keys and values: never packed
FACTOR_BYTES = 4  # of a scale or an offset


@dataclass(frozen=True)
class PackedPart:
    """Weights that lie packed on a device: codes, and float32 scales of groups that share one, with their offsets."""

    num_parameters: int
    bits: int  # of a code
    group_size: int
    has_offsets: bool = False

    @property
    def num_bytes(self) -> int:
        groups = self.num_parameters // self.group_size
        return self.num_parameters * self.bits // 8 + groups * FACTOR_BYTES * (2 if self.has_offsets else 1)


def packed_parts(
    heads: Mapping[str, StoredTensor],
    config: dict[str, Any],
    experts: ExpertConfig | None = None,
    mixer: MixerConfig | None = None,
) -> tuple[PackedPart, ...]:
    """The products of a dense decoder whose parts all have one packed form, as `stacked_weights` keeps them.

    Those of `experts`, where the kernels multiply them, are one for all experts of a layer; those of a `mixer` stand
    around its state. Matrices of whose form numbers alone tell count as if they were dequantized.
    """
    last = EMBEDDING if config.get("tie_word_embeddings") else HEAD
    products = defaultdict[str, list[StoredTensor]](list)
    named = [] if experts is None else list(_products_of(experts))
    named += [] if mixer is None else list(_products_of_mixer(mixer))
    for name, head in heads.items():
        for pattern, product in named:
            if (layer := pattern.match(name)) is not None:
                products[f"{layer[1]}{product}"].append(head)
        if (found := PRODUCT.match(name)) is not None and found[2] != OF_HEADS:
            products[f"{found[1]}{STACKED.get(found[2], found[2])}"].append(head)
        elif name == last:
            products[name].append(head)
    return tuple(part for parts in products.values() if (part := _part(parts)) is not None)


def _products_of(experts: ExpertConfig) -> Iterator[tuple[re.Pattern[str], str]]:
    """The names of experts' matrices, and of what all rows meet, each with the product that it is a part of."""
    names = experts.names
    found = {} if names.fused is None else {each: each for each in (names.fused.gate_up, names.fused.down)}
    found |= {name: f"experts.{STACKED.get(role, role)}" for role, name in (names.each or {}).items()}
    found |= {f"{name}.weight": f"shared.{STACKED.get(role, role)}" for role, name in (names.shared or {}).items()}
    found |= {f"{name}.weight": name for name in names.latent or ()}
    return ((_in_a_layer(name), product) for name, product in found.items())


def _products_of_mixer(mixer: MixerConfig) -> Iterator[tuple[re.Pattern[str], str]]:
    """The same of matrices in front of states and behind them; those of heads are a product of their own."""
    for name, roles in mixer.names.linears.items():
        product = "output" if roles == ("output",) else "heads" if roles[0] in ("betas", "steps") else "channels"
        yield _in_a_layer(f"{mixer.names.part}.{name}.weight"), f"mixer.{product}"


def _in_a_layer(name: str) -> re.Pattern[str]:
    """The tensor of that name in any layer, of any expert."""
    return re.compile(r"^(model\.layers\.\d+\.)" + re.escape(name).replace(r"\{\}", r"\d+") + "$")


def num_floats(heads: Mapping[str, StoredTensor], experts: ExpertConfig) -> int:
    """Count the numbers that are float32 whatever the dtype: those of routers, and sinks."""
    names = (
        experts.names.router,
        experts.names.router_bias,
        experts.names.choice_bias,
        experts.names.shared_gate,
        SINKS,
    )
    patterns = [_in_a_layer(name) for name in names if name is not None]
    return sum(head.num_numbers for name, head in heads.items() if any(each.match(name) for each in patterns))


def num_beside(heads: Mapping[str, StoredTensor], config: dict[str, Any]) -> int:
    """The numbers of a packed head that is tied: it lies beside the embedding, whose rows are plain."""
    embedding = heads.get(EMBEDDING)
    if embedding is None or _kind(embedding) is None or not config.get("tie_word_embeddings"):
        return 0
    return embedding.num_numbers


def _kind(head: StoredTensor) -> PackedKind | None:
    return PACKED.get(head.dtype) if head.form is None else head.form


def _part(heads: list[StoredTensor]) -> PackedPart | None:
    kinds = {_kind(head) for head in heads}
    kind = kinds.pop()
    if kinds or kind is None or not fills_blocks(kind.group, heads[0].shape[-1]):
        return None
    return PackedPart(sum(head.num_numbers for head in heads), kind.bits, kind.group, kind.has_offsets)
