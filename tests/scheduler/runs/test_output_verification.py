"""An output file is verified without its run, with the job file that it answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.run.run import Run
from tests.scheduler.commands.command_parts import invoke, refusal, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.worker.session.session_parts import run_to_end

LONG = 700  # tokens: three spans


def _output_and_jobs(folder: Path, model: Path, *lines: dict[str, Any], **settings: Any) -> tuple[Path, list[str]]:
    """Return an output file, and the arguments that verify it, without those for `settings`."""
    lines = lines or (
        {"custom_id": "long", "prompt": "the quick", "max_tokens": LONG, "seed": 3, "ignore_eos": True}
        | {"metadata": {"k": "v"}},
        {"custom_id": "two", "prompt": "the brown", "max_tokens": 40, "n": 2},
    )
    jobs = write_jobs(folder / "jobs.jsonl", *lines)
    options = {"dtype": "float32", "num_threads": 1, "seed": 5} | settings
    run = submit_file(jobs, str(folder / "run"), model=str(model), **options).run
    run_to_end(run, model, *run.jobs(), checkpoint_seconds=600.0, **settings)
    Run.open(run.store.uri).write_output()
    output = folder / "run" / "output.jsonl"
    verify = ["verify", str(output), "--jobs", jobs, "--model", str(model), "--dtype", "float32"]
    return output, [*verify, "--sample-seed", "0", "--seed", "5"]


def test_an_output_file_is_verified_without_its_run(tmp_path: Path, tiny_model: Path) -> None:
    output, arguments = _output_and_jobs(tmp_path, tiny_model)
    shutil.rmtree(output.parent / "results")
    done = invoke(*arguments)
    exact = "exact: 780 tokens of 5 spans in 3 jobs are what this model draws (sample seed 0)\n"
    assert (done.exit_code, done.output) == (0, exact)
    assert invoke(*arguments[:-1], "6").exit_code == 1  # another seed for the line without one


def test_an_output_file_is_verified_with_the_options_that_changed_its_prompts_and_rules(
    tmp_path: Path, tiny_model: Path
) -> None:
    few = {"json": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": True}}
    line = {"custom_id": "list", "prompt": "the", "max_tokens": 30, "structured_outputs": few}
    settings = {"lenient_schemas": True, "plain_content": True}
    _, arguments = _output_and_jobs(tmp_path, tiny_model, line, **settings)
    done = invoke(*arguments, "--lenient-schemas", "--plain-content")
    assert (done.exit_code, done.output[:6]) == (0, "exact:"), done.output
    assert "uniqueItems" in refusal(*arguments, "--plain-content")


def test_an_output_file_that_was_changed_is_found(tmp_path: Path, tiny_model: Path) -> None:
    output, arguments = _output_and_jobs(tmp_path, tiny_model)
    first, *rest = output.read_text().splitlines()
    line = json.loads(first)
    line["response"]["body"]["choices"][0]["text"] += " more"
    output.write_text("\n".join([json.dumps(line), *rest]) + "\n")
    done = invoke(*arguments)
    assert done.exit_code == 1
    assert "job long: " in done.output
    assert "is no result of swiftbatch" in refusal(*arguments[:1], arguments[3], *arguments[2:])
    assert "expected --model with it" in refusal(*arguments[:4])
    assert "is a file: expected --jobs and --model with it" in refusal("verify", str(output))
    assert "expected an output FILE" in refusal("verify", str(output.parent), *arguments[2:])
    assert "found no folder" in refusal(*arguments, "--json", str(tmp_path / "no" / "report.json"))
    assert "--seed: expected --jobs with it" in refusal("verify", str(output.parent), "--seed", "5")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda body: body["usage"].update(prompt_tokens="6"), "the line of 'long': field 'response.body.usage.prompt"),
        (lambda body: body["metrics"].update(attempts=[3], num_rewinds=[]), None),
        (lambda body: body["choices"][0].pop("token_ids_sha256"), "the line of 'long' is no result of swiftbatch"),
    ],
)
def test_an_odd_output_file_is_refused_in_one_line(
    tmp_path: Path, tiny_model: Path, change: Callable[[dict[str, Any]], object], problem: str | None
) -> None:
    output, arguments = _output_and_jobs(tmp_path, tiny_model)
    first, *rest = output.read_text().splitlines()
    line = json.loads(first)
    change(line["response"]["body"])
    output.write_text("\n".join([json.dumps(line), *rest]) + "\n")
    if problem is None:
        assert invoke(*arguments).exit_code == 0
    else:
        assert problem in refusal(*arguments)


def test_an_output_file_of_another_chat_template_is_found(tmp_path: Path, tiny_model: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    chat = {"custom_id": "chat", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 40, "seed": 3}
    _, arguments = _output_and_jobs(tmp_path, model, chat)
    assert invoke(*arguments).exit_code == 0
    template = model / "chat_template.jinja"
    template.write_text("the " + template.read_text())
    done = invoke(*arguments)
    assert (done.exit_code, "job chat: " in done.output) == (1, True)
