"""Steps of accepted rows on their way next to their root's, in all layers at once: see `moving/move_rows.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.states.state_buffers import StateBuffers

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
