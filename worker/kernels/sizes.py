"""Sizes that kernels, caches, draws and memory plans agree on. Light: the command line knows them too."""

from __future__ import annotations

BLOCK = 64  # positions between two boundaries of attention
TILE_ROWS = 32  # rows of a forward by `transformers`' layers, and of the C kernels' panels
MIN_ROWS = 2  # a single row would take another kernel (matrix times vector) in some shapes, with other bits
NUM_ROWS = 64  # rows of every forward on a GPU, padding included
MOST_SLOTS = 32  # twice as many bring a fifth more tokens up to here (docs/speed.md), and each job takes longer
RING_LAYERS = 2  # layers of offloaded caches that are on a GPU at a time: one is used while the next comes
