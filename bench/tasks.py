"""Prompts by task, as files of benchmarks have them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftbatch.jobs.job import Message
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.text.tokenizer import Chat, TextCodec

OWN_TASKS = Path(__file__).with_name("tasks.jsonl")
"""Six kinds of prompts in our own words; a kind's long ones come first."""
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
TESTED = "You are an expert Python programmer. {task}\nYour code should pass these tests:\n\n{tests}\n"


@dataclass(frozen=True)
class Task:
    """A question of one or more turns."""

    category: str
    turns: tuple[str, ...]
    response_format: dict[str, Any] | None = None  # as a line has it


def chat_ids(codec: TextCodec, messages: list[Message]) -> list[int]:
    """Return a chat in the model's template, or the texts alone if it takes none."""
    try:
        return codec.encode_one(Chat(messages, None)).token_ids
    except ValueError:
        return codec.encode_one("\n\n".join(message.content for message in messages)).token_ids


def read_tasks(path: Path) -> list[Task]:
    """Read a `.jsonl` file or a `.json` list, also packed as `.gz`. Raises BenchError."""
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        is_list = path.name.removesuffix(".gz").endswith(".json")
        lines = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise BenchError(f"prompts {path}: cannot be read as JSON lines: {error}") from error
    if not lines or not isinstance(lines, list):
        raise BenchError(f"prompts {path}: it has no prompts; expected one JSON object a line")
    return [_task(line, f"prompts {path}, number {number}") for number, line in enumerate(lines, 1)]


def _task(fields: Any, where: str) -> Task:
    for names, make in FORMS.items():
        if isinstance(fields, dict) and fields.keys() >= set(names):
            task = make(fields)
            if task.turns and all(isinstance(text, str) and text for text in (task.category, *task.turns)):
                return task
    known = "; ".join(", ".join(names) for names in FORMS)
    raise BenchError(f"{where}: expected an object with texts in the fields of one of these forms: {known}")


def _conversation(fields: dict[str, Any]) -> Task:
    category, turns = fields["category"], fields["turns"]
    return Task("conversation" if category in MT_BENCH else category, tuple(turns) if isinstance(turns, list) else ())


def _mbpp(fields: dict[str, Any]) -> Task:
    task, tests = fields.get("text") or fields.get("prompt"), "\n".join(map(str, fields["test_list"]))
    return Task("MBPP", (TESTED.format(task=task, tests=tests),) if task else ())


FORMS: dict[tuple[str, ...], Callable[[dict[str, Any]], Task]] = {
    ("question_id", "category", "turns"): _conversation,  # SpecBench, MT-Bench
    ("task_id", "code", "test_list"): _mbpp,
    ("task_id", "prompt", "entry_point"): lambda fields: Task("HumanEval", (fields["prompt"],)),
    ("question", "answer"): lambda fields: Task("GSM8K", (fields["question"],)),
    # our own
    ("category", "prompt"): lambda fields: Task(fields["category"], (fields["prompt"],), fields.get("response_format")),
}
"""Makers of tasks by the fields that tell a form; the first form that fits counts."""
