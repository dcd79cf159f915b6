from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.tasks import OWN_TASKS, Task, read_tasks
from swiftbatch.worker.decode_bench import BenchError

FORMS: dict[str, tuple[dict[str, Any], Task]] = {
    "SpecBench": (
        {"question_id": 201, "category": "translation", "turns": ["Translate this."], "reference": ["Dies."]},
        Task("translation", ("Translate this.",)),
    ),
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Make it shorter."]},
        Task("conversation", ("Write a letter.", "Make it shorter.")),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
        Task("HumanEval", ("def f():\n",)),
    ),
    "GSM8K": ({"question": "How many?", "answer": "So many.\n#### 4"}, Task("GSM8K", ("How many?",))),
    "ours": ({"category": "prose", "prompt": "Write."}, Task("prose", ("Write.",))),
}
MBPP = {"task_id": 11, "code": "def f(): ...", "test_list": ["assert f() == 1", "assert f() != 2"]}


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_are_read(form: str, tmp_path: Path) -> None:
    fields, task = FORMS[form]
    (tmp_path / "lines.jsonl").write_text(json.dumps(fields) + "\n\n" + json.dumps(fields) + "\n")
    (tmp_path / "list.json").write_text(json.dumps([fields, fields]))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress((json.dumps(fields) + "\n").encode()))
    assert read_tasks(tmp_path / "lines.jsonl") == read_tasks(tmp_path / "list.json") == [task, task]
    assert read_tasks(tmp_path / "packed.jsonl.gz") == [task]


@pytest.mark.parametrize("name", ["text", "prompt"])
def test_a_task_of_mbpp_comes_with_its_tests_in_both_published_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(MBPP | {name: "Write a function f."}))
    [task] = read_tasks(tmp_path / "mbpp.jsonl")
    assert task.category == "MBPP"
    assert "Write a function f.\n" in task.turns[0]
    assert "assert f() == 1\nassert f() != 2\n" in task.turns[0]
    assert "def f()" not in task.turns[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no prompts"),
        ("{", "JSON lines"),
        ('{"prompt": "alone"}', "number 1: expected an object with texts in the fields of one of these forms"),
        ('{"category": "a", "prompt": "b"}\n{"category": "a", "prompt": 3}', "number 2"),
        ('{"category": "a", "question_id": 3, "turns": "b"}', "number 1"),
        (json.dumps(MBPP), "number 1"),
    ],
)
def test_a_file_of_no_known_form_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(BenchError, match=says) as caught:
        read_tasks(tmp_path / "file.jsonl")
    assert "\n" not in str(caught.value)


def test_our_own_prompts_are_ten_of_six_kinds() -> None:
    tasks = read_tasks(OWN_TASKS)
    assert set(Counter(task.category for task in tasks).values()) == {10}
    assert len({task.category for task in tasks}) == 6
    assert len({task.turns for task in tasks}) == 60
