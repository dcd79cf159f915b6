from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.worker.interpreter  # noqa: F401
from bench import long as long_bench
from bench import tokenswift_ablation as ablation
from bench import triforce_ablation
from swiftbatch.worker import decode_bench
from swiftbatch.worker.decode_bench import BenchOptions, DecodeBenchOptions, bench_slots, run_decode_bench
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles
from tests.tiny_targets import numbers_as_a_gpu_has_them as numbers_as_a_gpu_has_them
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

TEXT = "the lazy fox jumps over the dog. " * 80


def few_decoded(**shared: Any) -> None:
    asked = {"positions": (10, 20), "num_tokens": 5, "engines": ("autoregressive", "suffix")}
    run_decode_bench(DecodeBenchOptions(temperature=0.0, min_p=0.1, repetition_penalty=1.0, seed=0, **asked, **shared))


def few_long(**shared: Any) -> None:
    asked = {"num_tokens": 5, "prefill": 40, "every": 20, "plain_every": 20}
    list(long_bench.run(long_bench.Options(engine="suffix", **asked, **shared)))


def tokenswift_table(**shared: Any) -> None:
    list(ablation.run(ablation.Options(table="14", engine="tokenswift", num_tokens=320, **shared)))


def triforce_table(**shared: Any) -> None:
    list(triforce_ablation.run(triforce_ablation.Options(table="1", prefill=300, num_tokens=40, **shared)))


@pytest.mark.parametrize(
    ("benchmark", "longest"), [pytest.param(few_decoded, 2048, marks=pytest.mark.slow), (few_long, 45)]
)  # one warms up
def test_what_is_measured_fits_into_the_slots_that_are_asked_for(
    one_layer_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: Callable[..., None], longest: int
) -> None:
    loaded = []

    def load(files: ModelFiles, *_: Any, slots: SlotsWanted, **_others: Any) -> TargetModel:
        assert slots == SlotsWanted(longest, 0, 2)
        assert slots.num_slots is not None
        loaded.append(cuda_target(files, torch.float32, slots.num_slots, slots.longest_job))
        return loaded[-1]

    monkeypatch.setattr(TargetModel, "load", load)
    for module in (decode_bench, long_bench):
        monkeypatch.setattr(module, "step_costs_of", lambda target: free_rows)
    (tmp_path / "text.txt").write_text(TEXT)
    benchmark(model=str(one_layer_model), text=tmp_path / "text.txt", num_threads=1)
    assert len(loaded) == 1


class _LoadedError(Exception):
    pass


@pytest.mark.parametrize(
    ("benchmark", "slots"),
    [(tokenswift_table, SlotsWanted(8512, 2048, 2)), (triforce_table, SlotsWanted(340, 1024, 2))],
)
def test_tables_ask_for_their_longest_texts(
    one_layer_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    benchmark: Callable[..., None],
    slots: SlotsWanted,
) -> None:
    def load(options: BenchOptions, files: ModelFiles, found: SlotsWanted | None = None) -> TargetModel:
        raise _LoadedError(found)

    monkeypatch.setattr(BenchOptions, "load", load)
    monkeypatch.setattr(ablation, "check_length", lambda *_: None)  # the table's texts are longer than this model's
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(_LoadedError) as loaded:
        benchmark(model=str(one_layer_model), text=tmp_path / "text.txt", num_threads=1)
    [found] = loaded.value.args
    assert (found.partial_budget, found.num_slots) == (slots.partial_budget, slots.num_slots)
    assert slots.longest_job <= found.longest_job < slots.longest_job + 150  # the most that a needle may take


def test_partial_caches_are_those_of_the_engine_that_keeps_most() -> None:
    assert bench_slots(("suffix", "tokenswift-paper"), 90) == SlotsWanted(90, 8192, 2, partial_chunk=0)
    assert bench_slots(("suffix", "tokenswift", "triforce"), 90, 3) == SlotsWanted(90, 2048, 4)
