"""Finds jobs whose prompts begin alike, by keys of their tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

import numpy as np

from swiftbatch.jobs.job import LoraAdapter

KEY_TOKENS = 64  # tokens per key
KEY_BYTES = 4
BLOCK = Struct(f"<{KEY_TOKENS}I")


@dataclass(frozen=True)
class SharedPrompt:
    """The part of a prompt that other prompts share."""

    group: int | None = None  # prompts of a group share at least half of their length
    num_tokens: int = 0  # first tokens shared with another prompt, in multiples of `KEY_TOKENS`


NOT_SHARED = SharedPrompt()


def prompt_keys(token_ids: Sequence[int], lora: LoraAdapter | None = None) -> bytes:
    """Return one key per `KEY_TOKENS` tokens; prompts with equal keys probably, not certainly, begin alike.

    Prompts of different adapters have other keys, because their caches differ.
    """
    start = 0 if lora is None else zlib.crc32(lora.fingerprint.encode())
    num_keys = len(token_ids) // KEY_TOKENS
    blocks = (token_ids[KEY_TOKENS * number : KEY_TOKENS * (number + 1)] for number in range(num_keys))
    return b"".join(zlib.crc32(BLOCK.pack(*block), start).to_bytes(KEY_BYTES, "little") for block in blocks)


def shared_prompts(keys: Sequence[bytes]) -> list[SharedPrompt]:
    """Return each prompt's shared part, in the order of `keys`."""
    order = sorted(range(len(keys)), key=keys.__getitem__)  # sorting puts similar prompts next to each other
    pairs = [(_num_alike(keys[one], keys[other]), one, other) for one, other in pairwise(order)]
    found = [NOT_SHARED] * len(keys)
    for number, (num_keys, *pair) in enumerate(pairs):
        is_half = 2 * num_keys * KEY_BYTES >= max(len(keys[place]) for place in pair) > 0
        known = found[pair[0]].group
        group = (number if known is None else known) if is_half else None
        for place in pair:
            own = found[place]
            most = max(own.num_tokens, num_keys * KEY_TOKENS)
            found[place] = SharedPrompt(own.group if group is None else group, most)
    return found


def _num_alike(one: bytes, other: bytes) -> int:
    num_bytes = min(len(one), len(other))
    differs = np.frombuffer(one[:num_bytes], "<u4") != np.frombuffer(other[:num_bytes], "<u4")
    return int(differs.argmax()) if differs.any() else len(differs)
