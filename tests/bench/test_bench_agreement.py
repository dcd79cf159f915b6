from __future__ import annotations

from pathlib import Path

import pytest

from bench.agreement import Options, run
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE
from tests.worker.kernels.kernel_parts import needs_kernels


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The {number}th night was colder than the {number - 1}th. " for number in range(400)))
    return path


def make_options(text: Path, **changes: object) -> Options:
    fields = {
        "caches": ("scan:128", "full:1", "streaming:32"),
        "positions": (1700,),
        "num_tokens": 12,
        "temperatures": (0.0, 1.0),
        "min_p": 0.1,
        "text": text,
        "seed": 0,
        "device": "cpu",
    }
    return Options.model_validate(fields | changes)


@needs_kernels
def test_a_cache_that_holds_everything_always_agrees_and_others_less(text: Path) -> None:
    options = make_options(text, dtype="float32")  # in bfloat16 two candidates may tie within rounding
    records = list(run(options))
    shares = {(record["cache"], record["temperature"]): record["share_alike"] for record in records}
    assert shares["full:1", 0.0] == shares["full:1", 1.0] == 1.0
    assert shares["scan:128", 0.0] >= 0.75
    assert len(shares) == 6
    assert all(record["round_ms"] > 0 for record in records)


def test_an_unknown_cache_names_the_known_ones(text: Path) -> None:
    with pytest.raises(BenchError, match=r"got medusa; expected one of: summary, .*scan"):
        next(run(make_options(text, caches=("medusa:5",))))


def test_models_whose_keys_are_not_scanned_are_refused(
    text: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    with pytest.raises(BenchError, match="keys are scanned by compiled kernels alone"):
        next(run(make_options(text, model=str(tiny_model), positions=(100,))))
