"""The defaults of sampling fields, but for the temperature. Light: the command line shows them."""

from __future__ import annotations

TOP_P = 1.0
ETA = 0.0
REPETITION_PENALTY = 1.0
PENALTY_WINDOW = 1024  # tokens
