"""Benchmarks and checks of the whole, which are run from the repository's root and are not installed."""
