"""Benchmarks of whole batches: real runs with real workers, measured from their first job to their last."""
