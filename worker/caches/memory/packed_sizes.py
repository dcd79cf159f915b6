"""Weights that stay packed on a GPU, told from the heads of a model's files. Without torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.model.gguf.tensor_types import PACKED
from swiftbatch.worker.model.stored import Form
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD, text_name

PRODUCT = re.compile(r"^model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)_proj\.weight$")
STACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # parts, and the product of them
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


def packed_parts(forms: Mapping[str, Form], config: dict[str, Any]) -> tuple[PackedPart, ...]:
    """The products of a dense decoder whose parts all have one packed form, as `stacked_weights` keeps them."""
    head = EMBEDDING if config.get("tie_word_embeddings") else HEAD
    products = defaultdict[str, list[Form]](list)
    for stored, form in forms.items():
        name = text_name(stored, config) or stored
        if (found := PRODUCT.match(name)) is not None:
            role = found[1]
            products[name.replace(f".{role}_proj.", f".{STACKED.get(role, role)}_proj.")].append(form)
        elif name == head:
            products[name].append(form)
    return tuple(part for parts in products.values() if (part := _part(parts)) is not None)


def num_beside(forms: Mapping[str, Form], config: dict[str, Any]) -> int:
    """The numbers of a packed head that is tied: it lies beside the embedding, whose rows are plain."""
    kind, shape = next((form for name, form in forms.items() if text_name(name, config) == EMBEDDING), ("", ()))
    return math.prod(shape) if config.get("tie_word_embeddings") and kind in PACKED else 0


def _part(forms: list[Form]) -> PackedPart | None:
    kinds = {PACKED.get(kind) for kind, _ in forms}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    number = sum(math.prod(shape) for _, shape in forms)
    return PackedPart(number, kind.bits, kind.group, kind.has_offsets)
