"""The tables of Token Recycling run, differ in what they are about, and sum up what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench import token_recycling_ablation as recycling
from bench.__main__ import main
from bench.tables import Record
from bench.token_recycling_ablation import PAPER, PARTS, RECYCLING_TABLES, Options, run, shown
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import locate_model

TASKS = [{"category": name, "prompt": f"the {name} fox jumps over the dog {n}"} for name in "ab" for n in range(3)]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    turns = {"question_id": 1, "category": "writing", "turns": ["the quick fox", "jumps over"]}
    path.write_text("\n".join(map(json.dumps, [*TASKS, turns])))
    return path


@pytest.mark.parametrize("table", RECYCLING_TABLES)
def test_arms_have_known_options_and_labels_of_their_own(table: str) -> None:
    arms = RECYCLING_TABLES[table].arms
    assert len({arm.label for arm in arms}) == len(arms)
    for arm in arms:
        if arm.options:
            engine_entry(arm.engine, arm.options)


@pytest.mark.parametrize(
    ("table", "about"),
    [("3a", "max_nodes"), ("3b", "max_depth"), ("3c", "update"), ("k", "candidates")],
)
def test_arms_of_a_figure_differ_in_what_it_is_about_and_in_nothing_else(table: str, about: str) -> None:
    options = [engine_entry(PAPER, arm.options).options for arm in RECYCLING_TABLES[table].arms]
    found = [each.model_dump() for each in options if each is not None]
    assert {name for name in found[0] if len({str(each[name]) for each in found}) > 1} == {about}
    assert len(found) == len(RECYCLING_TABLES[table].arms)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("3b", "4"))])
def test_a_table_has_a_record_of_every_arm_and_answer(
    table: str, prompts: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "store.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    save_heads(tmp_path, torch.zeros(2, 64, 64), locate_model(str(tiny_model)).fingerprint, "medusa")
    sizes = {"per_category": 2, "num_tokens": 8, "prompts": prompts, "datastore": tmp_path / "store.txt"}
    sizes["medusa"] = tmp_path
    options = Options(table=table, model=str(tiny_model), num_threads=1, **sizes)
    records = list(run(options))
    labels = {arm.label for arm in RECYCLING_TABLES[table].arms} | {"autoregressive"}
    assert {record["arm"] for record in records} == labels
    for label in labels - {"autoregressive"}:
        own = [record for record in records if record["arm"] == label]
        assert sorted(record["category"] for record in own) == ["a", "a", "b", "b", "conversation", "conversation"]
    assert len({record["turn"] for record in records}) == 6
    rows = list(shown(records, options))
    assert rows[0] == {"words": RECYCLING_TABLES[table].title}
    assert len(rows) == 1 + (len(PARTS) if table == "4" else len(labels))


def test_the_same_answers_come_at_every_temperature_and_order(prompts: Path, tiny_model: Path) -> None:
    sizes = {"per_category": 1, "num_tokens": 6, "prompts": prompts, "temperature": 1.0}
    records = list(run(Options(table="1", model=str(tiny_model), num_threads=1, **sizes)))
    assert not {"rest", "Medusa-1"} & {record["arm"] for record in records}  # without a datastore and heads
    shuffled = {each["tokens_sha256"] for each in records if each["arm"] == "the same, shuffled"}
    assert shuffled == {each["tokens_sha256"] for each in records if each["arm"] == PAPER}


def test_other_tokens_than_plain_decoding_s_stop_the_bench() -> None:
    with pytest.raises(BenchError, match="lookahead: its tokens"):
        recycling._compare("lookahead", np.array([1, 2]), np.array([1, 3]))


def made_up(arm: str, category: str, seconds: float, **others: Any) -> Record:
    counts = {"num_tokens": 100, "num_steps": 50, "seconds": seconds, "plain_seconds": 8.0}
    return {"arm": arm, "category": category} | counts | dict.fromkeys(PARTS, 1.0) | others


def test_rates_are_those_of_all_answers_together() -> None:
    records = [made_up(PAPER, "a", 2.0), made_up(PAPER, "b", 4.0, num_steps=20), made_up(PAPER, "b", 4.0)]
    [_, row] = shown(records, Options(table="1"))
    assert row == {
        **{"method": PAPER, "a": 4.0, "b": 2.0},
        **{"MAT": 300 / 120, "tokens/s": 30.0, "speed-up": 2.4},
    }


def test_parts_are_milliseconds_of_a_step() -> None:
    [_, *rows] = shown([made_up(PAPER, "a", 5.0, forward=6.0)], Options(table="4"))
    assert [row["part"] for row in rows] == list(PARTS)
    assert rows[2] == {"part": "forward", "ms per step": 120.0, "share": 0.6}
    assert rows[0] == {"part": "preparing", "ms per step": 20.0, "share": 0.1}


def test_runs_draw_other_prompts_and_shuffling_keeps_them(prompts: Path) -> None:
    chosen = [Options(prompts=prompts, per_category=1, seed=seed).tasks() for seed in range(6)]
    assert all([task.category for task in tasks] == ["a", "b", "conversation"] for tasks in chosen)
    assert len({str(tasks) for tasks in chosen}) > 1
    assert chosen[0] == Options(prompts=prompts, per_category=1, seed=0).tasks()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--table", "9"], "3a"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--tokens", "4090"], "tokens: "),
        (["--datastore", "/nowhere.txt", "--table", "1"], "/nowhere.txt"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(args: list[str], says: str, tiny_model: Path) -> None:
    result = CliRunner().invoke(
        main, ["papers", "token-recycling", "--model", str(tiny_model), "--per-category", "1", *args]
    )
    assert result.exit_code == 2
    assert says in result.stderr.splitlines()[-1]
