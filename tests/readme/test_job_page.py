"""The page about job lines has valid examples, and names every field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

from swiftbatch.jobs.errors import LineCode
from swiftbatch.jobs.input.request_fields import NOT_SUPPORTED, WITHOUT_EFFECT, ChatFields, LineFields
from swiftbatch.scheduler.display.events import FieldsWithoutEffect
from swiftbatch.worker.model.model_files import EMBEDDED
from swiftbatch.worker.text.tool_calls import FORMS
from tests.jobs.input.job_lines import read_lines
from tests.readme.command_lines import blocks, page, section, spans
from tests.scheduler.commands.submit_parts import submit_file
from tests.worker.model.lora_parts import write_adapter

PAGE = page("docs/jobs.md")
EXAMPLES = [line for line in (*"\n".join(blocks(PAGE)).splitlines(), *spans(PAGE)) if line.startswith('{"custom_id"')]
OTHERS = section(PAGE, "Fields of other programs")


WITH_TOOLS = [line for line in EXAMPLES if json.loads(line).get("tools")]  # the embedded model reads none
READS_TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_every_example_with_tools_becomes_a_job(tmp_path: Path, tiny_model: Path) -> None:
    model, path = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "jobs.jsonl"
    (model / "chat_template.jinja").write_text(READS_TOOLS)
    path.write_text("".join(f"{line}\n" for line in WITH_TOOLS))
    submission = submit_file(str(path), str(tmp_path / "run"), max_tokens=100, model=str(model))
    assert submission.rejects == []
    assert len(submission.jobs) == len(WITH_TOOLS) > 1


def test_every_family_of_calls_is_named() -> None:
    rows = [line.split(" | ") for line in section(PAGE, "Tools").splitlines() if line.startswith("| ")]
    assert {form.family for form in FORMS} <= {cells[0].removeprefix("| ") for cells in rows}


def test_every_example_becomes_a_job(tmp_path: Path) -> None:
    examples = [line for line in EXAMPLES if line not in WITH_TOOLS]
    lines = [json.loads(line) | {"custom_id": str(number)} for number, line in enumerate(examples)]
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    markers = ("<think>", "</think>")  # the embedded model has none
    lora = (f"tales={write_adapter(tmp_path / 'tales', EMBEDDED)}",)
    submission = submit_file(str(path), str(tmp_path / "run"), max_tokens=100, thinking_markers=markers, lora=lora)
    assert submission.rejects == []
    assert set(submission.jobs.custom_ids()) == {line["custom_id"] for line in lines}
    assert len(lines) > 25


def test_every_field_has_an_example() -> None:
    examples = [json.loads(line) for line in EXAMPLES]
    named = {name for values in examples for name in {*values, *values.get("body", {})}}
    assert {
        *LineFields.model_fields,
        *ChatFields.model_fields,
        "prompt",
        "prompt_token_ids",
        "messages",
    } - named == set()


def test_every_code_of_a_rejected_line_is_named() -> None:
    table = section(PAGE, "Rejected lines").partition("| code |")[2]
    assert {*get_args(LineCode)} == {*spans(table)} - {"custom_id", "--endpoint"}


def test_every_field_of_other_programs_is_named() -> None:
    idle, refused = OTHERS.split("These are not supported:")
    assert {*spans(idle)} >= WITHOUT_EFFECT
    assert {*spans(refused)} >= {*NOT_SUPPORTED, "add_special_tokens"}


def test_what_is_told_is_what_the_page_shows(tmp_path: Path) -> None:
    told, refused, _ = (block.strip() for block in blocks(OTHERS))
    assert told == str(FieldsWithoutEffect({"user": 120, "stream": 3}))
    body = {"prompt": "Once", "watermarking": True}
    _, (reject,) = read_lines(tmp_path, {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    assert refused == reject.reason
