"""Benchmarks and checks, run from a checkout and not installed."""
