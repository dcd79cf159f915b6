"""Reads the layers of Llama-Nemotron models, whose parts neural architecture search (NAS) has chosen. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.model.config_values import POSITIVE, SIZE, SWITCH, Config, KeyRule, shown

WIDTH_STEP = 256
NOTHING = (None, False)  # values of keys for parts that the layer does not have


@dataclass(frozen=True)
class NASBlock:
    """A layer's parts: the queries' heads per head of keys, and the MLP's width; 0 for a part that it lacks."""

    group: int
    width: int


def nas_blocks(config: Config) -> list[NASBlock]:
    """Read the parts of each layer.

    Raises KeyError or TypeError for absent sizes, ValueError for other parts, whose text is a fault of the config.
    """
    blocks, count, heads = config["block_configs"], config["num_hidden_layers"], config["num_attention_heads"]
    if not isinstance(blocks, list) or len(blocks) != count:
        found = f"{len(blocks)} block_configs" if isinstance(blocks, list) else f"block_configs = {blocks!r:.80}"
        raise ValueError(f"config.json has {found}; expected one for each of {count} layers")
    hidden = SIZE.of(config, "hidden_size")
    read = [_block(block, number, hidden) for number, block in enumerate(blocks)]
    groups = sorted({block.group for block in read} - {0})
    if len(groups) != 1 or heads % groups[0]:
        raise ValueError(
            f"config.json has block_configs with n_heads_in_group = {', '.join(map(str, groups)) or 'null'} for "
            f"{heads} heads; expected a divisor that is the same in all layers that attend"
        )
    return read


def _block(block: Any, number: int, hidden: int) -> NASBlock:
    group = _size(block, number, "attention", "n_heads_in_group", SIZE)
    width = int(2 * round(_size(block, number, "ffn", "ffn_mult", POSITIVE), 6) * hidden / 3)
    return NASBlock(group, -(-width // WIDTH_STEP) * WIDTH_STEP)


def _size(block: Any, number: int, part: str, key: str, rule: KeyRule) -> Any:
    """Return the size of a layer's part, or 0 if the layer lacks it. Raises ValueError for a part of another form."""
    said, where = block.get(part) if isinstance(block, dict) else block, f"block_configs[{number}].{part}"
    if not isinstance(said, dict):
        raise ValueError(f"config.json has {where} = {said!r:.80}; expected an object")
    if others := sorted(each for each, value in said.items() if each not in (key, "no_op") and value not in NOTHING):
        raise ValueError(
            f"config.json has {where}.{shown(others[0])} = {said[others[0]]!r:.80}; expected null or false"
        )
    is_absent = said.get("no_op", False)
    if not SWITCH.holds(is_absent):
        raise ValueError(f"config.json has {where}.no_op = {is_absent!r:.80}; expected {SWITCH.words}")
    if is_absent:
        return 0
    if not rule.holds(said.get(key)):
        raise ValueError(f"config.json has {where}.{key} = {said.get(key)!r:.80}; expected {rule.words}")
    return said[key]


def nas_faults(config: Config) -> Iterator[str]:
    try:
        nas_blocks(config)
    except ValueError as error:
        yield str(error)
    except (KeyError, TypeError):
        return  # other rules tell of absent sizes


def with_nas_sizes(config: Config) -> dict[str, Any]:
    """Return the config with the usual keys, which published ones leave null."""
    try:
        blocks = nas_blocks(config)
    except (KeyError, TypeError, ValueError):
        return dict(config)
    num_kv_heads = config["num_attention_heads"] // max(block.group for block in blocks)
    widest = max(block.width for block in blocks)
    return dict(config) | {"num_key_value_heads": num_kv_heads, "intermediate_size": widest}


def nas_layers(config: Config) -> list[str] | None:
    """Return the type of each layer, or None for faulty blocks."""
    try:
        return ["attention" if block.group else "mlp" for block in nas_blocks(config)]
    except (KeyError, TypeError, ValueError):
        return None


def nas_widths(config: Config) -> list[int]:
    return [block.width for block in nas_blocks(config)]
