"""Every line becomes a job or a reject, and a bad one stops no other."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.jobs.input.job_files import InputFileError
from swiftbatch.jobs.input.reader import BYTE_ORDER_MARK, MAX_LINE_BYTES
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.job import Job, JobRecord
from tests.jobs.input.job_lines import CHAT, GOOD, OPEN_LIMIT, batch, read, read_jobs, read_lines
from tests.jobs.run.table_file import from_parquet, to_parquet

pytestmark = pytest.mark.long


def test_both_forms_of_a_line_give_the_same_job(tmp_path: Path) -> None:
    (short,), _ = read(tmp_path, GOOD | {"temperature": 0, "stop": "END"})
    body = {"model": "any", "prompt": "Once", "max_tokens": 5, "temperature": 0.0, "stop": ["END"], "n": 1}
    (long,), _ = read(tmp_path, batch(body | {"stream": False}, custom_id="good"))
    assert short == long
    assert short.sampling.stop == ("END",)


def test_both_forms_of_a_chat_line_give_the_same_job(tmp_path: Path) -> None:
    (short,), _ = read(tmp_path, CHAT)
    body = {"messages": CHAT["messages"], "max_completion_tokens": 5}
    (long,), _ = read(tmp_path, batch(body, "/v1/chat/completions", custom_id="talk"))
    assert short == long
    assert short.messages[0].content == "Hello"


def test_null_stands_for_the_default_of_a_field_that_has_one(tmp_path: Path) -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "seed", "stop", "ignore_eos", "messages"])
    (plain, short), _ = read(tmp_path, GOOD, GOOD | nulls | {"custom_id": "other"})
    assert short.sampling == plain.sampling.model_copy(update={"seed": short.sampling.seed})
    body = {"messages": CHAT["messages"], "max_completion_tokens": 7, "max_tokens": None, "n": None, "stream": None}
    other = body | {"max_completion_tokens": None, "max_tokens": 7}
    lines = [batch(values, "/v1/chat/completions", custom_id=name) for name, values in (("a", body), ("b", other))]
    jobs, rejects = read(tmp_path, *lines)
    assert rejects == []
    assert [job.sampling.max_tokens for job in jobs] == [7, 7]


def test_a_missing_seed_follows_from_run_seed_and_custom_id(tmp_path: Path) -> None:
    def seeds(run_seed: int) -> list[int | None]:
        jobs, _ = read(
            tmp_path, GOOD, GOOD | {"custom_id": "other"}, GOOD | {"custom_id": "own", "seed": 7}, run_seed=run_seed
        )
        return [job.sampling.seed for job in jobs]

    assert seeds(1) == seeds(1)
    assert seeds(1)[:2] != seeds(2)[:2]
    assert len({*seeds(1), *seeds(2)}) == 5
    assert seeds(1)[2] == 7


def test_every_signed_and_unsigned_64_bit_number_is_a_seed_and_a_job_of_its_own(tmp_path: Path) -> None:
    seeds = [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1]
    given = [GOOD | {"custom_id": str(number), "seed": seed} for number, seed in enumerate(seeds)]
    wrapped = batch({"prompt": "Once", "max_tokens": 7, "seed": -1}, custom_id="wrapped")
    jobs, rejects = read(tmp_path, *given, wrapped)
    assert (rejects, [job.sampling.seed for job in jobs]) == ([], [*seeds, -1])
    same_names = [job.model_copy(update={"custom_id": "a"}) for job in jobs[: len(seeds)]]
    assert len({job.job_id("m") for job in same_names}) == len(seeds)


def test_a_duplicate_custom_id_is_a_reject_that_names_the_first_line(tmp_path: Path) -> None:
    jobs, rejects = read(tmp_path, GOOD | {"max_tokens": 0}, GOOD, b"", GOOD | {"prompt": "Other"})
    assert [job.prompt for job in jobs] == ["Once"]
    assert [reject.line_number for reject in rejects] == [1, 4]
    assert 'found "good" again (first in line 2)' in rejects[1].reason


def test_a_file_of_bad_lines_without_end_is_refused_at_some_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.jobs.input.reader.MAX_FIRST_REJECTS", 3)
    monkeypatch.setattr("swiftbatch.jobs.input.reader.MAX_REJECTS", 5)
    assert len(read(tmp_path, *[b"x"] * 3)[1]) == 3
    with pytest.raises(
        InputFileError, match=r"no job file: found over 3 bad lines and no good one, the first is line 1: not JSON"
    ):
        read(tmp_path, *[b"x"] * 4, GOOD)
    assert len(read(tmp_path, GOOD, *[b"x"] * 5)[1]) == 5
    with pytest.raises(InputFileError, match=r"no job file: found over 5 bad lines, the first is line 2: not JSON"):
        read(tmp_path, GOOD, *[b"x"] * 6)


def test_many_bad_lines_are_kept_in_order_beside_the_memory() -> None:
    some = [
        Reject(number, "\udc80" if number % 3 else None, f"\u2028{number}\n", None, "invalid_url")
        for number in range(3000)
    ]
    tracemalloc.start()
    kept = Rejects(some)
    assert list(zip(kept, kept, strict=True)) == list(zip(some, some, strict=True))  # two iterators at once
    kept.add(some[0])
    before, _ = tracemalloc.get_traced_memory()
    more = Rejects(Reject(number, None, "why" * 100) for number in range(150_000))
    assert more[149_999].line_number == 149_999
    assert tracemalloc.get_traced_memory()[0] - before < 40 * 2**20
    tracemalloc.stop()
    assert (len(kept), kept[-1], kept[1:3], kept[2999]) == (3001, some[0], some[1:3], some[2999])


def test_bom_crlf_and_blank_lines_are_fine_and_line_numbers_count_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(GOOD).encode()
        + b"\r\n\r\n  \t\r\n\xef\xbb\xbf"
        + json.dumps(CHAT).encode()
        + b"\r\n"
    )
    jobs, rejects = read_jobs(str(path), 1)
    assert [(number, job.custom_id) for number, job in jobs] == [(1, "good"), (4, "talk")]
    assert rejects == []


def test_a_huge_line_is_a_reject_read_in_bounded_memory_and_the_lines_after_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    num_bytes = 400 * 2**20
    with path.open("wb") as file:
        file.truncate(num_bytes)  # takes no disk
        file.seek(num_bytes)
        file.write(b"\n" + json.dumps(GOOD).encode())
    tracemalloc.start()
    try:
        jobs, rejects = read_jobs(str(path), 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(number, job.custom_id) for number, job in jobs] == [(2, "good")]
    assert [reject.line_number for reject in rejects] == [1]
    assert "too long" in rejects[0].reason
    assert peak < 3 * MAX_LINE_BYTES


@pytest.mark.parametrize("num_bytes", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1])
def test_the_limit_of_a_line_with_its_line_end_is_exact(tmp_path: Path, num_bytes: int) -> None:
    start, end = b'{"custom_id": "a", "max_tokens": 1, "prompt": "', b'"}'
    line = start + b"x" * (num_bytes - len(start) - len(end) - len(b"\n")) + end
    jobs, rejects = read(tmp_path, line, GOOD)
    assert [job.custom_id for job in jobs] == (["a", "good"] if num_bytes == MAX_LINE_BYTES else ["good"])
    assert len(jobs) + len(rejects) == 2


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_text_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "jobs.jsonl").write_bytes(content)
    with pytest.raises(InputFileError, match=r"jobs\.jsonl holds no jobs.*expected"):
        read_jobs(str(tmp_path / "jobs.jsonl"), 1)


def test_a_missing_file_and_a_directory_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"nowhere\.jsonl: No such file"):
        read_jobs(str(tmp_path / "nowhere.jsonl"), 1)
    with pytest.raises(InputFileError, match=r"Is a directory; expected a JSONL or Parquet file"):
        read_jobs(str(tmp_path), 1)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        *("custom_id", "prompt", "messages", "max_tokens", "temperature", "seed", "stop", "method", "url", "body"),
        *("model", "max_completion_tokens", "n", "best_of", "top_k", "user", "stream", "tools", "logprobs", "echo"),
        *("top_logprobs", "structured_outputs", "response_format", "thinking_token_budget"),
        *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
    ]
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": JSON_VALUES})
    | JSON_VALUES
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]) | JSON_VALUES, "content": st.text() | PARTS | JSON_VALUES},
    optional={"name": JSON_VALUES, "tool_calls": JSON_VALUES},
)
VALUES = st.dictionaries(FIELDS, JSON_VALUES, max_size=5)
OBJECTS = VALUES.map(lambda values: json.dumps(GOOD | values).encode())
CHATS = st.builds(
    lambda values, messages: json.dumps(CHAT | values | {"messages": messages}).encode(),
    VALUES,
    st.lists(MESSAGES, max_size=3),
)
BODIES = st.builds(
    lambda values, url: json.dumps(batch((GOOD | CHAT) | values, url)).encode(),
    VALUES,
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)


@settings(max_examples=40)
@given(
    lines=st.lists(
        OBJECTS | CHATS | BODIES | JSON_VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)
    )
)
def test_whatever_a_file_holds_every_line_with_text_is_a_job_or_a_reject(tmp_path: Path, lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b"") for line in lines] + [json.dumps(GOOD | {"custom_id": "last one"}).encode()]
    found, rejects = read_lines(tmp_path, b"", *lines)
    assert found[-1].custom_id == "last one"
    assert len(found) + len(rejects) == sum(bool(line.removeprefix(BYTE_ORDER_MARK).strip()) for line in lines)
    assert all("\n" not in reject.reason and reject.reason.isprintable() for reject in rejects)
    jobs = [job for line in found for job in line.jobs([OPEN_LIMIT] * max(1, len(line.prompts)))]
    assert len({job.job_id("m") for job in jobs}) == len(jobs)
    assert [Job.model_validate_json(job.model_dump_json()) for job in jobs] == jobs


TEXT = st.text(min_size=1, max_size=5)
CONTENTS = TEXT | st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
STRUCTURES = st.one_of(
    st.fixed_dictionaries({"json": st.dictionaries(TEXT, SCALARS)}),
    st.fixed_dictionaries({"json": st.dictionaries(TEXT, SCALARS).map(json.dumps)}),
    st.fixed_dictionaries({"regex": TEXT}),
    st.fixed_dictionaries({"grammar": TEXT}),
    st.fixed_dictionaries({"choice": st.lists(TEXT, min_size=1, max_size=4)}),
    st.sampled_from([{}, {"json_object": True}]),
)
GOOD_FIELDS = st.fixed_dictionaries(
    {"n": st.integers(1, 4)},
    optional={
        "max_tokens": st.none() | st.integers(1, 9),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "top_k": st.integers(-1, 9),
        "user": JSON_VALUES,
        "stream": st.booleans(),
        "tools": st.none() | st.just([]),
        "response_format": st.none() | st.just({"type": "text"}),
        "structured_outputs": st.none() | STRUCTURES,
        "thinking_token_budget": st.none() | st.integers(-1, 99),
    },
)
GOOD_PROMPTS = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(TEXT, min_size=1, max_size=3) | st.lists(st.integers(0, 9), min_size=1, max_size=3)},
    optional={"logprobs": st.none() | st.just(False) | st.integers(0, 20)},
)
CHAT_LOGPROBS = st.fixed_dictionaries({"logprobs": st.just(True)}, optional={"top_logprobs": st.integers(0, 20)})
GOOD_CHATS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": TEXT, "content": CONTENTS}, optional={"name": TEXT}), min_size=1, max_size=3
        )
    },
    optional={
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "a b", "\x1f"]), SCALARS),
        "reasoning_effort": st.none() | TEXT,
        "continue_final_message": st.booleans(),
    },
)
ASKING_CHATS = st.builds(lambda chat, asked: chat | asked, GOOD_CHATS, CHAT_LOGPROBS)


@settings(max_examples=40)
@given(fields=GOOD_FIELDS, text=GOOD_PROMPTS | GOOD_CHATS | ASKING_CHATS)
def test_a_good_line_is_the_same_jobs_in_both_forms_and_they_come_back_from_a_run_s_table(
    tmp_path: Path, fields: dict[str, Any], text: dict[str, Any]
) -> None:
    url = "/v1/chat/completions" if "messages" in text else "/v1/completions"
    (short,), rejects = read_lines(tmp_path, {"custom_id": "b"} | fields | text)
    (long,), more_rejects = read_lines(tmp_path, batch(fields | text, url))
    assert (rejects, more_rejects) == ([], [])
    assert short == long
    asked = text.get("top_logprobs", 0) if text.get("logprobs") is True else text.get("logprobs")
    assert short.sampling["logprobs"] == (None if asked is False else asked)
    num_prompts = max(1, len(short.prompts))
    jobs = short.jobs([OPEN_LIMIT] * num_prompts)
    assert len({job.job_id("m") for job in jobs}) == len(jobs) == num_prompts * fields["n"]
    records = [JobRecord(job.job_id("m"), job, 1, 3) for job in jobs]
    assert from_parquet(to_parquet(records, "run-1"), "run-1") == records
