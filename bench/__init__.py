"""Benchmarks and papers' tables: `python -m bench` from a checkout lists them. No install has them."""
