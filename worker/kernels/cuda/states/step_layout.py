"""The steps that positions leave in layers with a state, and the bytes of a slot's states. Without torch: for plans.

Steps lie in a ring by the entry of their position, for as long as a row may need them: nothing is moved where a
boundary is passed, and nothing is undone where a draft fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LANES

NUM_STATES = 2  # of a slot in a layer: at the newest boundary, and at the one before, so that a block can be taken back


class HeadSizes(Protocol):
    """The sizes of a layer's heads and of its convolution; without heads it is a convolution alone."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_key_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def conv_width(self) -> int: ...


@dataclass(frozen=True)
class StepLayout:
    """The step of a position in a layer, in float32 words: keys, updates, logarithms of decays, the inputs' bits."""

    num_keys: int
    num_updates: int
    num_heads: int
    num_inputs: int
    item_size: int  # bytes of an input
    ring: int  # positions

    @classmethod
    def of(cls, sizes: HeadSizes, item_size: int, num_rows: int) -> StepLayout:
        """Make room for two blocks behind a boundary, `num_rows` rows behind these, and inputs in front of all."""
        num_keys, num_updates = sizes.num_key_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim
        ring = 2 * BLOCK + num_rows + sizes.conv_width - 1
        return cls(num_keys, num_updates, sizes.num_heads, sizes.num_channels, item_size, ring)

    @property
    def decays(self) -> int:
        """The first word of logarithms of decays."""
        return self.num_keys + self.num_updates

    @property
    def inputs(self) -> int:
        """The first word of inputs."""
        return self.decays + -(-self.num_heads // LANES) * LANES

    @property
    def words(self) -> int:
        """Words of a step."""
        return self.inputs + self.num_inputs * self.item_size // 4


def slot_bytes(sizes: HeadSizes, num_layers: int, item_size: int, num_rows: int) -> int:
    """The bytes of a slot's states and steps in so many layers."""
    layout = StepLayout.of(sizes, item_size, num_rows)
    state = sizes.num_heads * sizes.key_dim * sizes.value_dim
    return 4 * num_layers * (NUM_STATES * state + layout.ring * layout.words)
