"""States of layers on a GPU, and the steps of positions behind them: what kernels read and write, in buffers that stay.

A slot has two states a layer: that at the boundary behind which its rows are, and that of the boundary before, so that
the last block can be rolled back. Its steps are those of `step_layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.states.step_layout import NUM_STATES, HeadSizes, StepLayout
from swiftbatch.worker.kernels.kernel_sizes import BLOCK


@dataclass(frozen=True)
class StateBuffers:
    """The states and steps of all layers and slots."""

    layout: StepLayout
    states: Tensor  # [num_layers, num_slots, NUM_STATES, num_heads, key_dim, value_dim] float32
    steps: Tensor  # [num_layers, num_slots, ring, words] float32
    inputs: Tensor  # [num_layers, num_slots, ring, num_channels] of the model's dtype, within the steps

    @classmethod
    def empty(
        cls, sizes: HeadSizes, num_layers: int, num_slots: int, dtype: torch.dtype, num_rows: int, device: torch.device
    ) -> StateBuffers:
        layout = StepLayout.of(sizes, dtype.itemsize, num_rows)
        heads = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
        states = torch.empty(num_layers, num_slots, NUM_STATES, *heads, device=device)
        steps = torch.empty(num_layers, num_slots, layout.ring, layout.words, device=device)
        return cls(layout, states, steps, steps.view(dtype)[..., layout.inputs * 4 // dtype.itemsize :])

    @property
    def num_slots(self) -> int:
        return self.states.shape[1]


def number_of_state(boundary: int) -> int:
    """The number of a slot's state that is the one at a boundary."""
    return boundary // BLOCK % NUM_STATES


MOVED_WORDS = 1024  # of a program
MOVE_WARPS = 4


@triton.jit
def move_step_words(
    steps_ptr, moves_ptr, num_moves, num_slots, RING: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr
):
    """Program (layer, words): every move, one after the other; those of a slot read before they are written over."""
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    steps_ptr += tl.program_id(0).to(tl.int64) * num_slots * (RING * WORDS) + columns
    inside = columns < WORDS
    for i in range(0, num_moves):
        slot = tl.load(moves_ptr + 3 * i).to(tl.int64)
        if slot >= 0:
            source, target = tl.load(moves_ptr + 3 * i + 1), tl.load(moves_ptr + 3 * i + 2)
            words = tl.load(steps_ptr + (slot * RING + source % RING) * WORDS, mask=inside)
            tl.store(steps_ptr + (slot * RING + target % RING) * WORDS, words, mask=inside)


def move_steps(states: StateBuffers, moves: Tensor) -> None:
    """Move steps in one launch; `moves [num_moves, 3] int32` on the device, as `move_rows` takes them, by entries."""
    num_layers, num_slots, ring, words = states.steps.shape
    move_step_words[(num_layers, triton.cdiv(words, MOVED_WORDS))](
        states.steps.view(torch.int32), moves, len(moves), num_slots, RING=ring, WORDS=words, WIDTH=MOVED_WORDS,
        num_warps=MOVE_WARPS,
    )  # fmt: skip
