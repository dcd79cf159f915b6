"""Tests, in folders that mirror the rooms of the product; shared parts lie beside those who use them most."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository
