"""The AMX code with tiles emulated in software, for other processors."""

from __future__ import annotations

from pathlib import Path

from tests.worker.kernels.kernel_parts import VARIANTS

EMULATED = "amx-bf16"
OTHER = "avx512-bf16"  # has the same single products; the rest of the code needs its instructions
CAN_EMULATE = OTHER in VARIANTS and EMULATED not in VARIANTS
EMULATED_TILES = Path(__file__).with_name("emulated_tiles.h")
FLAGS_OF_EMULATION = ("-include", str(EMULATED_TILES), "-O1")  # compiles in a third of -O3's time, with the same bits
