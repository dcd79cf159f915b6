from pathlib import Path

import pytest

from bench.checkpoints import BenchWorker, Options, make_run, run
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec

PROMPT = "The quick brown fox jumps over the lazy dog."


def test_a_model_that_is_fast_is_measured_step_by_step(tiny_model: Path, tmp_path: Path) -> None:
    """Such a job would end within the first slice."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = Options(
        model=str(tiny_model), engine="auto", positions=(64,), checkpoint_tokens=128, num_rounds=1, text=text
    )
    [record] = run(options)
    assert record["same_tokens"]
    assert record["bytes_per_token"] > 0


def test_its_run_counts_the_prompt_so_that_a_gpu_has_room_for_the_job(tiny_model: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", str(tiny_model), PROMPT, 5)
    [record] = Run.open(str(tmp_path / "run")).jobs()
    num_tokens = len(TextCodec(locate_model(str(tiny_model))).prompt_of(record.job).token_ids)
    assert num_tokens > 1
    assert Run.open(str(tmp_path / "run")).longest_job() == num_tokens + 5


def test_a_job_that_ends_meanwhile_is_told_of(tiny_model: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", str(tiny_model), PROMPT, 5)
    worker = BenchWorker(tmp_path / "run", EngineConfig(model=str(tiny_model), engine="autoregressive", device="cpu"))
    with pytest.raises(BenchError, match="the job ended while it was measured: take other positions"):
        worker.generate_to(50)
