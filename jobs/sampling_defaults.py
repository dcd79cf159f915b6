"""What sampling fields are where nothing is said, but for the temperature. Light: the command line shows them."""

from __future__ import annotations

TOP_P = 1.0
ETA = 0.0
REPETITION_PENALTY = 1.0
PENALTY_WINDOW = 1024  # tokens
