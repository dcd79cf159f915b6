"""Runs with LoRA adapters: which line has which, and what a run refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.shared_prompts import shared_prompts
from swiftbatch.scheduler.runs.run_manifest import refuse_changed_model
from swiftbatch.scheduler.runs.submission import Submission
from swiftbatch.scheduler.runs.verification import verify_run
from swiftbatch.worker.model.lora import WEIGHTS_FILE
from tests.scheduler.commands.command_parts import write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.model.lora_parts import write_adapter
from tests.worker.session.session_parts import PLAINLY

PROMPT = "the quick brown fox jumps over the lazy dog. " * 8
LINES: list[dict[str, Any]] = [
    {"custom_id": "none", "prompt": PROMPT},
    {"custom_id": "named", "prompt": PROMPT, "lora": "a"},
    {"custom_id": "as a model", "prompt": PROMPT, "model": "b", "n": 2},
    {"custom_id": "both", "prompt": PROMPT, "model": "b", "lora": "a"},
    {"custom_id": "null", "prompt": PROMPT, "model": "gpt", "lora": None},
    {"custom_id": "unknown", "prompt": PROMPT, "lora": "c"},
]


@pytest.fixture
def adapters(tiny_model: Path, tmp_path: Path) -> dict[str, Path]:
    return {name: write_adapter(tmp_path / name, tiny_model, seed) for seed, name in enumerate("ab")}


@pytest.fixture
def said(tiny_model: Path, adapters: dict[str, Path]) -> dict[str, Any]:
    lora = tuple(f"{name}={folder}" for name, folder in reversed(adapters.items()))
    return {"model": str(tiny_model), "dtype": "float32", "device": "cpu", "max_tokens": 12, "lora": lora}


def submitted(tmp_path: Path, said: dict[str, Any]) -> Submission:
    lines = [{"temperature": 0, "ignore_eos": True, **line} for line in LINES]
    return submit_file(write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run"), **said)


def test_a_line_names_its_adapter_and_an_unknown_one_is_rejected(tmp_path: Path, said: dict[str, Any]) -> None:
    found = submitted(tmp_path, said)
    names = {record.job.name: record.job.lora_name for record in found.run.records()}
    assert names == {"none": None, "named": "a", "as a model[0]": "b", "as a model[1]": "b", "both": "a", "null": None}
    [reject] = found.rejects
    assert (reject.custom_id, reject.reason) == ("unknown", "field 'lora': found 'c', expected one of a, b")


def test_a_line_that_names_an_adapter_of_a_run_without_any_is_rejected(tmp_path: Path, said: dict[str, Any]) -> None:
    rejects = submitted(tmp_path, said | {"lora": ()}).rejects
    assert [reject.custom_id for reject in rejects] == ["named", "both", "unknown"]
    assert all(reject.reason.endswith("expected a run with --lora NAME=FOLDER") for reject in rejects)


def test_prompts_are_thought_to_be_shared_among_jobs_of_one_adapter_alone(tmp_path: Path, said: dict[str, Any]) -> None:
    records = list(submitted(tmp_path, said).run.records())
    groups: dict[str | None, set[int | None]] = {}
    for record, shared in zip(records, shared_prompts([each.prompt_keys for each in records]), strict=True):
        groups.setdefault(record.job.lora_name, set()).add(shared.group)
    assert len({group for (group,) in groups.values()}) == 3


def test_results_are_those_of_the_lines_adapters_and_can_be_verified(tmp_path: Path, said: dict[str, Any]) -> None:
    run = submitted(tmp_path, said).run
    run_all(run, Path(said["model"]), **PLAINLY, lora=run.manifest.lora)
    texts = {
        record.job.name: line["response"]["body"]["choices"][0]["text"]
        for record, line in run.output_lines()
        if line is not None
    }
    assert texts["named"] == texts["both"]
    assert texts["none"] == texts["null"]
    assert len({texts["named"], texts["none"], texts["as a model[0]"]}) == 3
    assert verify_run(run, 1.0, 0).verdict == "exact"


def test_an_adapter_is_part_of_the_run_and_of_its_jobs(
    tmp_path: Path, said: dict[str, Any], adapters: dict[str, Path], tiny_model: Path
) -> None:
    run = submitted(tmp_path, said).run
    assert run.manifest.lora == tuple(f"{name}={folder}" for name, folder in adapters.items())
    ids = {record.job.name: record.job_id for record in run.records()}
    assert set(submitted(tmp_path, {"model": said["model"]}).run.job_ids()) == {*ids.values()}
    with pytest.raises(RunError, match=r"^--lora a=.*: the run at .* has a=.* b=.*; leave the option away"):
        submitted(tmp_path, said | {"lora": said["lora"][1:]})
    write_adapter(adapters["a"], tiny_model, 7)
    for refuse in (lambda: refuse_changed_model(Run.open(run.store.uri)), lambda: submitted(tmp_path, said)):
        with pytest.raises(RunError, match=f"was made with another adapter a .{WEIGHTS_FILE} is another"):
            refuse()
    shutil.rmtree(tmp_path / "run")
    others = {record.job.name: record.job_id for record in submitted(tmp_path, said).run.records()}
    assert {name for name, job_id in others.items() if job_id != ids[name]} == {"named", "both"}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            "a=./nowhere",
            "adapter a: ./nowhere is no folder here, nor one in a bucket .*; put it back, or correct --lora",
        ),
        (
            "a=" + "long" * 1000,
            "adapter a: longlong.* is no folder here, nor .* nor ORG/ADAPTER on the hub; put it back, or",
        ),
        ("a={folder}", "found no adapter_config.json in"),
    ],
)
def test_an_adapter_that_is_not_there_is_refused_before_anything_is_written(
    lora: str, words: str, tmp_path: Path, said: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=words):
        submitted(tmp_path, said | {"lora": (lora.format(folder=tmp_path),)})
    assert not (tmp_path / "run").exists()


def test_two_adapters_of_one_name_are_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="--lora: found a twice"):
        submitted(tmp_path, said | {"lora": (said["lora"][1],) * 2})
