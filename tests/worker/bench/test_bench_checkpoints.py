"""`bench checkpoints` measures jobs that are shorter than its slices of time."""

from pathlib import Path

from swiftbatch.worker.bench.checkpoints import CheckpointBenchOptions, run_checkpoint_bench


def test_a_model_that_is_fast_is_measured_step_by_step(tiny_model: Path, tmp_path: Path) -> None:
    """Its job would be over within the first slice."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = CheckpointBenchOptions(
        model=str(tiny_model), engine="auto", positions=(64,), checkpoint_tokens=128, num_rounds=1, text=text
    )
    [record] = run_checkpoint_bench(options)
    assert record.has_same_tokens
    assert record.num_bytes_per_token > 0
