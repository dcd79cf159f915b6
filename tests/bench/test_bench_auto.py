"""The loss of `auto` on a grid: every cell has all engines, the same tokens, and the best of them."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Group

from bench import auto as bench_auto
from bench.auto import AutoBenchOptions, AutoRecord, render, run_auto_bench
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.forward import target_model
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.kv.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.kv_offload import offloaded_cache
from swiftbatch.worker.sampling.sequence import Sequence
from tests.bench.bench_parts import words


@pytest.fixture(autouse=True)
def two_jobs_of_20_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_auto, "CELL_TOKENS", 40)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the lazy fox number {n} jumps. " for n in range(60)))
    return path


def make_options(tiny_model: Path, text: Path, **changes: object) -> AutoBenchOptions:
    fields = {"model": str(tiny_model), "engines": ("suffix",), "positions": (60, 30), "slot_counts": (1, 3)}
    fields |= {"num_tokens": (20,), "num_repetitions": 1}
    grid = {
        "temperatures": (0.0, 1.0),
        "min_p": 0.1,
        "seed": 0,
        "text": text,
        "device": "cpu",
    }
    return AutoBenchOptions.model_validate(fields | grid | changes)


def test_every_cell_has_all_engines_with_the_same_tokens(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    records = run_auto_bench(make_options(tiny_model, text, json_path=path))
    cells = [(record.position, record.num_sequences, record.temperature) for record in records]
    assert cells == [(p, n, t) for p in (30, 60) for n in (1, 3) for t in (0.0, 1.0)]
    for record in records:
        assert list(record.tokens_per_second) == ["autoregressive", "auto", "suffix", "autoregressive again"]
        assert all(rate > 0 for rate in record.tokens_per_second.values())
        assert record.has_same_tokens
    assert json.loads(path.read_text())["results"] == [record.model_dump() for record in records]


def test_processor_time_counts_for_the_figures_and_for_the_choice_and_for_nothing_behind_them(
    tiny_model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = itertools.count(1)
    monkeypatch.setattr(time, "thread_time", lambda: float(next(num_read)))  # a second between any two readings
    cell = {"positions": (30,), "slot_counts": (1,), "temperatures": (1.0,), "num_threads": 1}
    (record,) = run_auto_bench(make_options(tiny_model, text, **cell, processor_time=True))
    num_tokens = 2 * 20
    assert record.tokens_per_second["autoregressive"] == num_tokens / 3  # two jobs, and the change between them
    assert record.tokens_per_second["auto"] < num_tokens / 10  # it reads the clock at its steps, too
    before = next(num_read)
    assert seconds_now() != before + 1
    assert next(num_read) == before + 1


def test_processor_time_of_several_threads_is_refused(tiny_model: Path, text: Path) -> None:
    with pytest.raises(ValidationError, match="use it with --threads 1, on a CPU"):
        make_options(tiny_model, text, num_threads=2, processor_time=True)


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
        tiny_model, text, positions=(30,), slot_counts=(1,), temperatures=(1.0,), num_tokens=(40, 20), num_repetitions=2
    )
    records = run_auto_bench(options)
    assert [(record.num_tokens, record.repetition) for record in records] == [(20, 0), (20, 1), (40, 0), (40, 1)]
    assert all(record.has_same_tokens for record in records)
    assert seeds == [(20, 0), (20, 1), (20, 2), (20, 3), (40, 0), (40, 1)]


def test_caches_outside_the_device_give_the_same_tokens(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(shape: CacheShape, max_length: int, folder: str) -> FullKVCache:
        made.append(folder)
        return offloaded_cache(shape, max_length, folder)

    monkeypatch.setattr(target_model, "offloaded_cache", noted)
    records = run_auto_bench(make_options(tiny_model, text, positions=(60,), kv_offload=tmp_path))
    assert [record.has_same_tokens for record in records] == [True] * 4
    assert set(made) == {str(tmp_path)}
    with pytest.raises(KVRoomError, match="--kv-offload"):
        run_auto_bench(make_options(tiny_model, text, kv_offload=tmp_path / "none"))


def test_the_table_says_what_is_lost_against_the_best_other_engine() -> None:
    rates = {"autoregressive": 100.0, "auto": 150.0, "suffix": 200.0}
    record = AutoRecord(
        position=60_000,
        temperature=0.6,
        num_sequences=8,
        num_tokens=20,
        repetition=1,
        tokens_per_second=rates,
        has_same_tokens=False,
    )
    better = record.model_copy(update={"tokens_per_second": rates | {"auto": 190.0}, "has_same_tokens": True})
    lines = words(Group(render([better, record])))
    assert ["60000", "0.6", "8", "20", "100", "1.50x", "suffix", "2.00x", "0.75x", "no"] in lines
    caption = "auto at worst: 0.75x of the best other engine, 1.50x of plain decoding"
    assert caption in [" ".join(line) for line in lines]


def test_plain_decoding_beside_itself_shows_how_far_a_ratio_wanders_and_is_never_the_best_other_engine() -> None:
    rates = {"autoregressive": 100.0, "auto": 95.0, "autoregressive again": 120.0}
    place = {"position": 60, "temperature": 0.6, "num_sequences": 8, "num_tokens": 20, "repetition": 0}
    record = AutoRecord.model_validate(place | {"tokens_per_second": rates, "has_same_tokens": True})
    slower = record.model_copy(update={"tokens_per_second": rates | {"autoregressive again": 97.0}})
    lines = [" ".join(line) for line in words(Group(render([record, slower])))]
    assert "60 0.6 8 20 100 0.95x autoregressive 1.00x 0.95x yes" in lines
    assert "plain decoding beside itself: 0.97x" in " ".join(lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ("medusa",)}, "expected some of: auto, autoregressive"),
        ({"slot_counts": ()}, "got none; expected numbers from 1 to 32"),
        ({"slot_counts": (0,)}, "expected numbers from 1 to 32"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"json_path": Path("nowhere/auto.json")}, "there is none at nowhere"),
        ({"positions": ()}, "at least one position"),
        ({"num_tokens": (4,)}, "got 4; expected numbers of 5 or more"),
        ({"num_repetitions": 0}, "num_repetitions"),
    ],
)
def test_a_grid_that_can_not_be_is_refused(
    tiny_model: Path, text: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as refusal:
        make_options(tiny_model, text, **changes)
    assert refusal.value.error_count() == 1  # and nothing else is wrong


def test_a_text_that_is_too_short_is_refused(tiny_model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match="the highest position needs 3000"):
        run_auto_bench(make_options(tiny_model, text, positions=(3000,)))
