from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from bench import auto as bench_auto
from bench.auto import Options, run, shown
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.forward import target_model
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.file_offload import offloaded_cache
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.sampling.sequence import Sequence


@pytest.fixture(autouse=True)
def two_jobs_of_20_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_auto, "CELL_TOKENS", 40)


def make_options(tiny_model: Path, text: Path, **changes: object) -> Options:
    fields = {"model": str(tiny_model), "engines": ("suffix",), "positions": (60, 30), "slots": (1, 3)}
    fields |= {"num_tokens": (20,), "num_repetitions": 1}
    grid = {
        "temperatures": (0.0, 1.0),
        "min_p": 0.1,
        "seed": 0,
        "text": text,
        "device": "cpu",
    }
    return Options.model_validate(fields | grid | changes)


def test_every_cell_has_all_engines_with_the_same_tokens(tiny_model: Path, text: Path) -> None:
    records = list(run(make_options(tiny_model, text)))
    cells = [(record["position"], record["num_sequences"], record["temperature"]) for record in records]
    assert cells == [(p, n, t) for p in (30, 60) for n in (1, 3) for t in (0.0, 1.0)]
    for record in records:
        assert list(record["tokens_per_second"]) == ["autoregressive", "auto", "suffix", "autoregressive again"]
        assert all(rate > 0 for rate in record["tokens_per_second"].values())
        assert record["same_tokens"]


def test_processor_time_counts_for_the_figures_and_for_the_choice_and_for_nothing_behind_them(
    tiny_model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = itertools.count(1)
    monkeypatch.setattr(time, "thread_time", lambda: float(next(num_read)))  # one second between any two readings
    cell = {"positions": (30,), "slots": (1,), "temperatures": (1.0,), "num_threads": 1}
    (record,) = list(run(make_options(tiny_model, text, **cell, processor_time=True)))
    num_tokens = 2 * 20
    assert record["tokens_per_second"]["autoregressive"] == num_tokens / 3  # two jobs, and the switch between them
    assert record["tokens_per_second"]["auto"] < num_tokens / 10  # it also reads the clock at its steps
    before = next(num_read)
    assert seconds_now() != before + 1
    assert next(num_read) == before + 1


def test_processor_time_of_several_threads_is_refused(tiny_model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match="use it with --threads 1, on a CPU"):
        next(run(make_options(tiny_model, text, num_threads=2, processor_time=True)))


def test_short_jobs_follow_each_other_and_repetitions_have_other_seeds(
    tiny_model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[tuple[int, int]] = []
    sequences = bench_auto._Grid._sequences

    def noted(grid: bench_auto._Grid, name: str, cell: bench_auto._Cell, job: int) -> list[Sequence]:
        found = sequences(grid, name, cell, job)
        if name == "auto":
            seeds.extend((cell.num_tokens, sequence.sampling.seed) for sequence in found)
        return found

    monkeypatch.setattr(bench_auto._Grid, "_sequences", noted)
    options = make_options(
        tiny_model, text, positions=(30,), slots=(1,), temperatures=(1.0,), num_tokens=(40, 20), num_repetitions=2
    )
    records = list(run(options))
    assert [(record["num_tokens"], record["repetition"]) for record in records] == [(40, 0), (40, 1), (20, 0), (20, 1)]
    assert all(record["same_tokens"] for record in records)
    assert seeds == [(40, 0), (40, 1), (20, 0), (20, 1), (20, 2), (20, 3)]


def test_caches_outside_the_device_give_the_same_tokens(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(shape: CacheShape, max_length: int, folder: str) -> FullKVCache:
        made.append(folder)
        return offloaded_cache(shape, max_length, folder)

    monkeypatch.setattr(target_model, "offloaded_cache", noted)
    records = list(run(make_options(tiny_model, text, positions=(60,), kv_offload=tmp_path)))
    assert [record["same_tokens"] for record in records] == [True] * 4
    assert set(made) == {str(tmp_path)}
    with pytest.raises(KVRoomError, match="--kv-offload"):
        next(run(make_options(tiny_model, text, kv_offload=tmp_path / "none")))


def test_the_table_has_the_worst_repetition_of_a_cell_and_plain_decoding_is_set_beside_itself() -> None:
    cell = bench_auto._Cell(60_000, 8, 0.6, 20, 0)
    rates = {"autoregressive": 100.0, "auto": 150.0, "suffix": 200.0, "autoregressive again": 220.0}
    records = [
        bench_auto._figures(cell, rates | changed, True)
        for changed in ({"auto": 190.0}, {"autoregressive again": 97.0})
    ]
    [row, words] = shown(records, Options(text=Path("book.txt")))
    assert (row["best_other"], row["auto_to_best"], row["auto_to_plain"]) == ("suffix", 0.75, 1.5)
    said = "auto at worst: 0.75x of the best other engine, 1.50x of plain decoding; plain decoding beside itself: 0.97x"
    assert words == {"words": said}
