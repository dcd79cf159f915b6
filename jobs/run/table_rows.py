"""Rows of a run's tables: what a job asked for, what came of it, and the columns that its line brought along."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.job import JobRecord, Message
from swiftbatch.jobs.run.job_table import in_groups
from swiftbatch.jobs.run.output_line import IGNORED, TOKEN_COLUMNS, lists_of, plain, texts_of

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

MESSAGE = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
COLUMNS: dict[str, str] = {  # with type names shared by Arrow and `datasets`
    **dict.fromkeys(["custom_id"], "string"),
    **dict.fromkeys(["choice_index", "revision"], "int64"),
    **dict.fromkeys(["status", "prompt"], "string"),
    "prompt_ids": "list of int64",
    "messages": "list of messages",
    **dict.fromkeys(["text", "reasoning_content", "finish_reason", "error_code", "error_message"], "string"),
    **dict.fromkeys(["prompt_tokens", "completion_tokens", "seed", "max_tokens"], "int64"),
    "temperature": "float64",
    "top_k": "int64",
    **dict.fromkeys(["top_p", "min_p", "repetition_penalty"], "float64"),
    **dict.fromkeys(["sampling", "model", "token_ids_sha256"], "string"),
    **dict.fromkeys(TOKEN_COLUMNS, "list of int32"),
    **dict.fromkeys(["logprobs", "tool_calls", "prompt_logprobs"], "string"),
    IGNORED: "list of string",
    "job_id": "string",
}
ROWS_PER_GROUP = 1000
MAX_CHARACTERS_PER_GROUP = 32 * 2**20
CHARACTERS_PER_NUMBER = 36  # bytes of a token id in a list of Python's


def row_of(record: JobRecord, line: Mapping[str, Any]) -> Row:
    """Return the row of a job and its own output line, without a revision."""
    if (error := line["error"]) is not None:
        return failed_row(record, error["code"], error["message"])
    body = line["response"]["body"]
    choice = body["choices"][0]
    return _asked(record) | {
        "status": "finished",
        **texts_of(body, choice),
        **lists_of(body, choice),
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "completion_tokens": body["usage"]["completion_tokens"],
        "model": body.get("model"),
        "token_ids_sha256": choice.get("token_ids_sha256"),
    }


def failed_row(record: JobRecord, code: str, message: str) -> Row:
    status = "cancelled" if code == "cancelled" else "failed"
    return _asked(record) | {"status": status, "error_code": plain(code), "error_message": plain(message)}


def _asked(record: JobRecord) -> Row:
    job = record.job
    return dict.fromkeys(COLUMNS) | {
        "custom_id": plain(job.custom_id),
        "choice_index": job.choice_index,
        "prompt": job.prompt,
        "prompt_ids": None if job.prompt_ids is None else list(job.prompt_ids),
        "messages": job.messages and list(map(_message, job.messages)),
        "prompt_tokens": record.num_prompt_tokens,
        "seed": _as_int64(job.sampling.seed),
        **{name: getattr(job.sampling, name) for name in SAMPLING},
        "sampling": json.dumps(job.sampling.identity(), sort_keys=True),
        "job_id": record.job_id,
    }


def _message(message: Message) -> Row:
    calls = [call.model_dump(mode="json") for call in message.tool_calls]
    return {name: getattr(message, name) for name in MESSAGE} | {"tool_calls": json.dumps(calls) if calls else None}


def _as_int64(seed: int | None) -> int | None:
    """Return the seed, or None if it does not fit the int64 column."""
    return seed if seed is not None and seed < 2**63 else None


def conversation(record: JobRecord, line: Mapping[str, Any]) -> Row | None:
    """Return a job's `messages` with the answer as the last one, and its `tools`; None without an answer or a text.

    A prompt is the message of a user.
    """
    job = record.job
    if line["error"] is not None or job.prompt_ids is not None:
        return None
    choice = line["response"]["body"]["choices"][0]
    if job.messages is None:
        text = choice["text"].removeprefix(job.prompt if job.sampling.echo else "")
        messages = [{"role": "user", "content": job.prompt}, {"role": "assistant", "content": text}]
        return {"messages": messages, "tools": None}
    messages, answer = list(map(_as_in_openai, job.messages)), choice["message"]
    if job.template is not None and job.template.continue_final_message:
        begun = messages.pop()
        answer = begun | answer | {"content": f"{begun.get('content', '')}{answer['content'] or ''}"}
    return {"messages": [*messages, answer], "tools": list(job.template.tools) or None if job.template else None}


def _as_in_openai(message: Message) -> Row:
    """Return a message of a job with all fields that OpenAI's form needs."""
    sent = message.as_sent()
    sent.pop("parts", None)
    calls = [call.model_dump(mode="json", exclude_none=True) for call in message.tool_calls]
    return sent | ({"tool_calls": calls} if calls else {})


# Columns that lines brought along.


JSON, LIST = "json", "list of "  # of a value that is no scalar and no list of scalars of one kind; in tables JSON text
SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64", str: "string"}


class KeptColumns:
    """The columns that a run's lines brought along: `note` finds their kinds and their names in a table."""

    def __init__(self, taken: Collection[str], fixed: Mapping[str, str] = MappingProxyType({})) -> None:
        """`taken` are the table's own columns. One of the same name is called `input_...` there.

        The kinds of `fixed` columns stay: a value of another kind goes to a column `..._json`, as JSON text.
        """
        self._taken, self._fixed = taken, fixed
        self._names: dict[str, str] = {}
        self._kinds: dict[str, str | None] = {}
        for name, kind in fixed.items():
            self._add(name, kind)

    def note(self, kept: str | None) -> None:
        for name, value in self._columns_of(kept).items():
            self._add(name, _kind(value))

    def kinds(self) -> dict[str, str]:
        """Return what `fixed` needs of columns with values."""
        return {name: kind for name, kind in self._kinds.items() if kind is not None}

    def columns(self) -> dict[str, str]:
        """Return the names in the table and their kinds."""
        return {self._names[name]: _final(kind) for name, kind in self._kinds.items()}

    def values(self, kept: str | None) -> Row:
        found = self._columns_of(kept)
        return {self._names[name]: _as_kind(found.get(name), self._kinds[name]) for name in self._names}

    def _columns_of(self, kept: str | None) -> Row:
        found = _columns_of(kept)
        for name in [name for name, value in found.items() if not self._fits(name, value)]:
            text = json.dumps(found.pop(name))
            while (name := f"{name}_json") in found:
                pass
            found[name] = text
        return found

    def _fits(self, name: str, value: Any) -> bool:
        fixed = self._fixed.get(name)
        return fixed is None or _merged(fixed, _kind(value)) == fixed

    def _add(self, name: str, kind: str | None) -> None:
        if name not in self._names:
            self._names[name] = self._free(name)
        self._kinds[name] = _merged(self._kinds.get(name), kind)

    def _free(self, name: str) -> str:
        name = plain(name)
        while not name or name in self._taken or name in self._names.values():
            name = f"input_{name}"
        return name


def _columns_of(kept: str | None) -> Row:
    if kept is None:
        return {}
    found = json.loads(kept)
    return {**found.get("columns", {}), **({"metadata": found["metadata"]} if "metadata" in found else {})}


def _kind(value: Any) -> str | None:
    """Return a value's kind; None for null."""
    if value is None:
        return None
    if not isinstance(value, list):
        is_small = type(value) is not int or -(2**63) <= value < 2**63
        return SCALARS.get(type(value), JSON) if is_small else JSON
    item = None
    for each in value:
        item = _merged(item, _kind(each))
    return _list_of(item)


def _list_of(item: str | None) -> str:
    return JSON if item is not None and item not in SCALARS.values() else f"{LIST}{item}"


def _merged(one: str | None, other: str | None) -> str | None:
    """Return the kind that holds values of both."""
    if one is None or other is None or one == other:
        return one or other
    if {one, other} == {"int64", "float64"}:
        return "float64"
    if one.startswith(LIST) and other.startswith(LIST):
        first, second = (None if kind == f"{LIST}None" else kind.removeprefix(LIST) for kind in (one, other))
        return _list_of(_merged(first, second))
    return JSON


def _final(kind: str | None) -> str:
    return "string" if kind in (None, JSON) else str(kind).replace("None", "string")


def _as_kind(value: Any, kind: str | None) -> Any:
    if value is None or kind is None:
        return None
    if kind == JSON:
        return json.dumps(value)
    if isinstance(value, list):
        return [_as_kind(each, kind.removeprefix(LIST)) for each in value]
    return float(value) if kind == "float64" else plain(value) if kind == "string" else value


# Tables.


def arrow_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Return the schema; all columns are nullable."""
    import pyarrow as pa

    kinds = {
        **{"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "float64": pa.float64()},
        **{"bool": pa.bool_(), "messages": pa.struct([(name, pa.string()) for name in MESSAGE])},
    }
    return pa.schema(
        [
            (name, pa.list_(kinds[kind.removeprefix(LIST)]) if kind.startswith(LIST) else kinds[kind])
            for name, kind in columns.items()
        ]
    )


def row_groups(rows: Iterable[Row], max_rows: int = ROWS_PER_GROUP) -> Iterator[list[Row]]:
    """Group rows into groups of at most `max_rows` rows, or fewer if the rows are long."""
    return in_groups(rows, max_rows, MAX_CHARACTERS_PER_GROUP, _num_letters)


def _num_letters(row: Row) -> int:
    texts = sum(len(value) for value in row.values() if isinstance(value, str))
    texts += sum(len(message["content"]) for message in row.get("messages") or ())
    return texts + CHARACTERS_PER_NUMBER * sum(len(value) for value in row.values() if isinstance(value, list))
