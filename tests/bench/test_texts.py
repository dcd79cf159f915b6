from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tables import Record
from bench.tasks import OWN_TASKS, read_tasks
from bench.texts import Options, run, shown
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.forward.step_costs import ROW_COUNTS

ROW_COSTS = (1.0, 1.0, 1.5, 2.0, 3.0, 5.0)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    lines = [
        {"category": kind, "prompt": f"the lazy fox {number} jumps"} for kind in ("chat", "prose") for number in (1, 2)
    ]
    lines.append({"category": "extraction", "prompt": "one two", "response_format": response_format})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records_of(tiny_model: Path, prompts: Path, **changes: object) -> tuple[list[Record], Options]:
    fields = {"model": str(tiny_model), "device": "cpu", "prompts": prompts, "num_tokens": (6, 20)}
    options = Options.model_validate(fields | {"row_costs": ROW_COSTS} | changes)
    return list(run(options)), options


@pytest.fixture(scope="module")
def modelled(tiny_model: Path, prompts: Path) -> tuple[list[Record], Options]:
    return records_of(tiny_model, prompts)


def test_answers_of_every_kind_and_temperature_have_the_tokens_of_plain_decoding(
    modelled: tuple[list[Record], Options],
) -> None:
    rows = [row for row in shown(*modelled) if "words" not in row]
    assert {(row["category"], row["temperature"]) for row in rows} == {
        (kind, temperature) for kind in ("chat", "prose", "extraction") for temperature in (0.0, 1.0)
    }
    assert all(row["same_tokens"] for row in rows)
    assert all(row["first_answer"] > 0 for row in rows)


def test_modelled_seconds_are_those_of_forwards_by_their_rows(modelled: tuple[list[Record], Options]) -> None:
    for record in modelled[0]:
        assert record["plain_seconds"] == pytest.approx(record["plain_tokens"] * ROW_COSTS[0])
        assert record["auto_seconds"] >= record["auto_steps"] * ROW_COSTS[0]
    assert any(record["auto_seconds"] > record["auto_steps"] * ROW_COSTS[0] for record in modelled[0])


def test_a_structure_is_kept(modelled: tuple[list[Record], Options]) -> None:
    assert {record["answer"] for record in modelled[0] if record["category"] == "extraction"} == {0}


def test_kinds_and_prompts_can_be_chosen_and_prose_continues_a_given_text(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the lazy fox jumps. " * 60)
    chosen = {"categories": "prose", "skip": 1, "per_category": 1, "temperatures": (0.0,), "num_tokens": (4,)}
    [record], options = records_of(tiny_model, prompts, text=text, position=30, row_costs=(), **chosen)
    assert (record["category"], record["answer"]) == ("prose", 0)
    [row, words] = shown([record], options)
    assert row["first_answer"] == row["auto_to_plain"]
    assert words["words"].endswith("(elapsed time)")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"row_costs": (1.0, 2.0)},
            f"got 2 numbers, expected one for each of {ROW_COUNTS} rows".replace("(", r"\(").replace(")", r"\)"),
        ),
        ({"categories": "poems"}, "got poems; expected some of: chat, prose, extraction"),
        ({"processor_time": True, "num_threads": 2}, "use it with --threads 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changes: dict[str, object], says: str, tiny_model: Path, prompts: Path
) -> None:
    with pytest.raises(BenchError, match=says):
        records_of(tiny_model, prompts, **changes)


def test_long_prompts_come_first_and_extractions_have_schemas() -> None:
    by_kind: dict[str, list[str]] = {}
    for task in read_tasks(OWN_TASKS):
        by_kind.setdefault(task.category, []).append(task.turns[0])
        assert task.response_format is None or task.category == "extraction"
    for kind in ("prose", "code edit", "extraction", "translation"):
        lengths = [len(prompt) for prompt in by_kind[kind]]
        assert min(lengths[:4]) > 2 * max(lengths[4:])
    files = [prompt.count("\n") for prompt in by_kind["code edit"][:4]]
    assert all(60 <= number <= 150 for number in files)
