"""The code for AMX where the processor has none: its tiles in software, compiled into a library for tests."""

from __future__ import annotations

from pathlib import Path

from tests.worker.kernels.kernel_parts import VARIANTS

EMULATED = "amx-bf16"
OTHER = "avx512-bf16"  # takes the same products one by one; the rest of the code needs its instructions
CAN_EMULATE = OTHER in VARIANTS and EMULATED not in VARIANTS
EMULATED_TILES = Path(__file__).with_name("emulated_tiles.h")
FLAGS_OF_EMULATION = ("-include", str(EMULATED_TILES), "-O1")  # a third of the time that -O3 compiles, of the same bits
