from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import LINE_END, unpacked
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.sampling_params import RepetitionDetection, loop_guard
from swiftbatch.jobs.shared_prompts import prompt_keys
from swiftbatch.scheduler.driver.queue_loading import load_queue, write_cancelled
from swiftbatch.scheduler.runs.run_manifest import computation_of
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import LineNotes, make_records
from swiftbatch.worker.constraints import thinking
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.input.job_lines import read_jobs
from tests.scheduler.commands.command_parts import invoke, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.tiny_targets import model as model

NUM_POSITIONS = 4096  # of the tiny model
FOX = "the quick brown fox"


@pytest.fixture(scope="module")
def num_fox_tokens(tiny_model: Path) -> int:
    return len(TextCodec(locate_model(str(tiny_model))).encode(FOX))


def limits(run: Run) -> dict[str, int]:
    return {record.job.custom_id: record.job.sampling.max_tokens for record in run.jobs()}


OPEN: dict[str, Any] = {"custom_id": "open", "prompt": FOX}
LIMITED: dict[str, Any] = {"custom_id": "limited", "prompt": FOX, "max_tokens": 5}


def test_an_open_limit_is_what_the_positions_leave_and_the_same_file_again_is_the_same_jobs(
    tmp_path: Path, tiny_model: Path, num_fox_tokens: int
) -> None:
    path, place = write_jobs(tmp_path / "jobs.jsonl", OPEN, LIMITED), str(tmp_path / "run")
    run = submit_file(path, place, model=str(tiny_model)).run
    assert limits(run) == {"open": NUM_POSITIONS - num_fox_tokens, "limited": 5}
    again = submit_file(path, place)
    assert (again.rejects, again.run.jobs()) == ([], run.jobs())


def test_an_open_limit_is_the_run_s_where_that_has_one_for_all_files_that_come(
    tmp_path: Path, tiny_model: Path, num_fox_tokens: int
) -> None:
    path, place = write_jobs(tmp_path / "jobs.jsonl", OPEN, LIMITED), str(tmp_path / "run")
    run = submit_file(path, place, model=str(tiny_model), max_tokens=7).run
    assert limits(run) == {"open": 7, "limited": 5}
    more = write_jobs(tmp_path / "more.jsonl", OPEN, OPEN | {"custom_id": "later"})
    for said in ({}, {"max_tokens": 7}):
        later = submit_file(more, place, **said)
        assert (later.rejects, limits(later.run)) == ([], {"open": 7, "limited": 5, "later": 7})
    with pytest.raises(RunError, match="was made with max_tokens 7, found 8; leave the option away"):
        submit_file(more, place, max_tokens=8)
    submit_file(more, str(tmp_path / "open"), model=str(tiny_model))
    with pytest.raises(RunError, match="was made without max_tokens, found 8; leave the option away"):
        submit_file(more, str(tmp_path / "open"), max_tokens=8)
    large = submit_file(path, str(tmp_path / "large"), model=str(tiny_model), max_tokens=10**6).run
    assert limits(large) == {"open": NUM_POSITIONS - num_fox_tokens, "limited": 5}


def test_a_line_that_says_nothing_of_loops_has_the_run_s_guard(tmp_path: Path, tiny_model: Path) -> None:
    own = {"max_pattern_size": 8, "min_count": 5}
    said = {"unsaid": None, "off": {}, "off-too": {"max_pattern_size": 0, "min_count": 3}, "own": own}
    lines = [LIMITED | {"custom_id": name, "repetition_detection": value} for name, value in said.items()]
    path, place = write_jobs(tmp_path / "jobs.jsonl", LIMITED, *lines), str(tmp_path / "run")
    run = submit_file(path, place, model=str(tiny_model), loop_guard="stop").run
    found = {record.job.custom_id: record.job.sampling.repetition_detection for record in run.jobs()}
    assert found == {
        "limited": loop_guard("stop"),
        "unsaid": loop_guard("stop"),
        "off": None,
        "off-too": None,
        "own": RepetitionDetection(**own),
    }
    again = submit_file(path, place)
    assert (again.rejects, again.run.jobs()) == ([], run.jobs())
    unguarded = submit_file(path, str(tmp_path / "unguarded"), model=str(tiny_model)).run
    ids = [{record.job.custom_id: record.job_id for record in each.jobs()} for each in (run, unguarded)]
    assert {name for name in ids[0] if ids[0][name] != ids[1][name]} == {"limited", "unsaid"}
    with pytest.raises(RunError, match="was made without loop_guard, found stop; leave the option away"):
        submit_file(path, str(tmp_path / "unguarded"), loop_guard="stop")


def test_a_line_that_says_nothing_of_a_thought_s_end_has_the_run_s(tmp_path: Path, tiny_model: Path) -> None:
    said: dict[str, dict[str, object]] = {
        "unsaid": {},
        "off": {"thinking_end": "stop"},
        "own": {"thinking_end": "close"},
        "measured": {"logprobs": 1},
        "both": {"logprobs": 1, "thinking_end": "close"},
    }
    lines = [LIMITED | {"custom_id": name} | fields for name, fields in said.items()]
    path, place = write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run")
    asked = {"model": str(tiny_model), "thinking_end": "close"}
    with pytest.raises(UserError, match=r"^--thinking-end: found close, and no markers of thinking are known"):
        submit_file(path, place, **asked)
    made = submit_file(path, place, thinking_markers=(" the", " dog"), loop_guard="close", **asked)
    found = {record.job.custom_id: record.job.sampling for record in made.run.jobs()}
    ends = {name: sampling.thinking_end for name, sampling in found.items()}
    assert ends == {"unsaid": "close", "off": None, "own": "close", "measured": None}
    guards = {name: sampling.repetition_detection for name, sampling in found.items()}
    assert guards == dict.fromkeys(("unsaid", "off", "own"), loop_guard("close")) | {"measured": loop_guard("stop")}
    [reject] = made.rejects
    assert reject.reason.startswith("field 'thinking_end': found 'close' with logprobs, expected no such field")


def test_a_prompt_that_leaves_no_position_is_a_reject(tmp_path: Path, tiny_model: Path) -> None:
    full = {"custom_id": "full", "prompt": [1] * NUM_POSITIONS}
    path = write_jobs(tmp_path / "jobs.jsonl", full, full | {"custom_id": "last", "prompt": [1] * (NUM_POSITIONS - 1)})
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert limits(submission.run) == {"last": 1}
    (reject,) = submission.rejects
    assert reject.reason == (
        "prompt: its 4096 tokens leave none to generate, expected fewer than the model's 4096 positions"
    )


def test_a_prompt_that_is_to_be_cut_keeps_its_last_tokens_and_may_be_of_any_length(
    tmp_path: Path, tiny_model: Path
) -> None:
    ids = TextCodec(locate_model(str(tiny_model))).encode(FOX)
    long = {"custom_id": "long", "prompt": "the fox " * 40_000, "truncate_prompt_tokens": -1}
    lines: list[dict[str, Any]] = [
        LIMITED | {"custom_id": "three", "truncate_prompt_tokens": 3},
        LIMITED | {"custom_id": "more", "truncate_prompt_tokens": 1000},
        LIMITED | {"custom_id": "given", "prompt": [5, 6, 7], "truncate_prompt_tokens": 2},
        long | {"max_tokens": 96},
        long | {"custom_id": "open"},
        long | {"custom_id": "no", "max_tokens": NUM_POSITIONS},
        {"custom_id": "chat", "messages": [{"role": "user", "content": FOX}], "truncate_prompt_tokens": 2},
        {"custom_id": "whole", "messages": [{"role": "user", "content": FOX}]},
    ]
    found = submit_file(write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run"), model=str(tiny_model))
    kept = {record.custom_id: unpacked(record.prompt_token_ids) for record in found.run.jobs()}
    assert (kept["three"], kept["more"], kept["given"]) == (ids[-3:], ids, [6, 7])
    assert (len(kept["long"]), len(kept["open"])) == (NUM_POSITIONS - 96, NUM_POSITIONS - 1)
    assert kept["chat"] == kept["whole"][-2:]
    assert {record.custom_id: record.num_prompt_tokens for record in found.run.jobs()} == {
        name: len(ids) for name, ids in kept.items()
    }
    assert [(reject.custom_id, reject.code) for reject in found.rejects] == [("no", "context_length_exceeded")]


def test_a_thought_that_a_cut_prompt_no_longer_opens_is_not_open(tmp_path: Path, tiny_model: Path) -> None:
    prompt = {"prompt": "a b the fox is", "max_tokens": 5}
    lines = [prompt | {"custom_id": str(num), "truncate_prompt_tokens": num} for num in (1, 100)]
    path, markers = write_jobs(tmp_path / "jobs.jsonl", *lines), (" the", " dog")
    run = submit_file(path, str(tmp_path / "run"), model=str(tiny_model), thinking_markers=markers).run
    assert {record.custom_id: record.last_marker for record in run.jobs()} == {"1": None, "100": "start"}


def test_what_is_too_long_or_changed_has_openai_s_code(tmp_path: Path, tiny_model: Path) -> None:
    ids = {"custom_id": "ids", "prompt": [1] * NUM_POSITIONS}
    more = LIMITED | {"custom_id": "more", "max_tokens": NUM_POSITIONS}
    far = LIMITED | {"custom_id": "far", "prompt": "the" * 50_000}
    text = LIMITED | {"custom_id": "id", "prompt": [10**6]}
    path = write_jobs(tmp_path / "jobs.jsonl", ids, more, far, text, LIMITED)
    found = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    codes = [reject.code for reject in found.rejects]
    assert codes == ["context_length_exceeded"] * 3 + ["invalid_value"]
    changed = write_jobs(tmp_path / "changed.jsonl", LIMITED | {"prompt": "Other"})
    [reject] = submit_file(changed, str(tmp_path / "run")).rejects
    assert reject.code == "duplicate_custom_id"


def test_token_ids_are_taken_as_they_are_and_those_of_no_token_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    codec = TextCodec(locate_model(str(tiny_model)))
    vocab_size = codec._vocab_size
    same = LIMITED | {"custom_id": "same", "prompt": codec.encode(FOX)}
    path = write_jobs(tmp_path / "jobs.jsonl", LIMITED, same, LIMITED | {"custom_id": "bad", "prompt": [1, vocab_size]})
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    text, ids = submission.run.jobs()
    assert codec.prompt_of(text.job).token_ids == codec.prompt_of(ids.job).token_ids
    assert text.num_prompt_tokens == ids.num_prompt_tokens
    (reject,) = submission.rejects
    assert reject.reason == f"prompt: found the token id {vocab_size}, expected ids below {vocab_size}"


def test_every_choice_has_the_length_and_the_limit_of_its_own_prompt(tmp_path: Path, tiny_model: Path) -> None:
    line = {"custom_id": "many", "prompt": [[1] * 4000, [1, 2]], "n": 2}
    path = write_jobs(tmp_path / "jobs.jsonl", line, line | {"custom_id": "too-long", "max_tokens": 97})
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    found = [(record.num_prompt_tokens, record.job.sampling.max_tokens) for record in submission.run.jobs()]
    assert found == [(4000, 96)] * 2 + [(2, 4094)] * 2
    assert [record.prompt_keys for record in submission.run.jobs()] == [prompt_keys([1] * 4000)] * 2 + [b""] * 2
    (reject,) = submission.rejects
    assert reject.reason.endswith("need 4097 positions, expected at most the model's 4096 (prompt 1 of 2)")


def test_fields_without_effect_are_told_of_in_one_line(tmp_path: Path, tiny_model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": FOX, "name": "Ann"}], "reasoning_effort": "low"}
    path = write_jobs(
        tmp_path / "jobs.jsonl",
        LIMITED | {"user": "a", "stream": True},
        LIMITED | {"user": "b", "custom_id": "b"},
        LIMITED | {"user": "c", "custom_id": "too-long", "max_tokens": 10**6},
        {"custom_id": "chat", **chat},
    )
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert submission.without_effect == {"user": 2, "stream": 1, "messages[].name": 1, "reasoning_effort": 1}
    write_cancelled(submission.run, submission.jobs.entries())
    found = "messages[].name (1 line), reasoning_effort (1 line), stream (1 line), user (2 lines)"
    told = invoke("submit", path, "--run", str(tmp_path / "run")).output
    assert told.count("without effect") == 1
    assert f"fields without effect here: {found}" in told.splitlines()
    shown = invoke("submit", path, "--run", str(tmp_path / "run"), "--json").output.splitlines()
    (event,) = [each for each in map(json.loads, shown) if each["event"] == "fields_without_effect"]
    assert event["fields"] == submission.without_effect
    assert "without effect" not in invoke("submit", path, "--run", str(tmp_path / "run"), "--quiet").output


def test_stop_texts_that_can_t_come_and_a_second_bos_are_told_of(tmp_path: Path, tiny_model: Path) -> None:
    stops = ("<|endoftext|>", "END", "<|endoftext|>\n", "a\ufffd")
    path = write_jobs(
        tmp_path / "jobs.jsonl",
        *({**LIMITED, "custom_id": f"stop-{number}", "stop": stop} for number, stop in enumerate(stops)),
        LIMITED | {"custom_id": "bos", "prompt": ["<|endoftext|>" + FOX, FOX, [1, 2]]},
        LIMITED | {"custom_id": "thought", "stop": "a", "stop_in_reasoning": True},
    )
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))  # whose tokenizer adds BOS
    assert submission.rejects == []
    assert submission.without_effect == {
        "stop: <|endoftext|> with more around it, though texts do not show special tokens": 1,
        "prompt: <|endoftext|> at its start, which the tokenizer adds itself": 1,
        "stop_in_reasoning": 1,
    }
    lengths = {record.job.name: record.num_prompt_tokens for record in submission.run.jobs()}
    assert lengths["bos[0]"] == lengths["bos[1]"] == lengths["stop-0"]
    codec = TextCodec(locate_model(str(tiny_model)))
    assert codec.encode_one("<|endoftext|>" * 2 + FOX).token_ids == [0, *codec.encode_one(FOX).token_ids]
    assert codec.encode_one("<|endoftext|>").token_ids == [0]


def test_a_stop_text_with_a_byte_that_no_token_has_is_told_of(tmp_path: Path, tiny_model: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    said = json.loads((model / "tokenizer.json").read_text())
    assert said["model"]["vocab"].pop("!") is not None  # no merge has it
    (model / "tokenizer.json").write_text(json.dumps(said))
    path = write_jobs(tmp_path / "jobs.jsonl", LIMITED | {"stop": ["fox", "fox!"]})
    submission = submit_file(path, str(tmp_path / "run"), model=str(model))
    assert submission.without_effect == {"stop: a text with characters that no token has": 1}


def test_fields_that_only_the_model_can_tell_to_be_wrong_are_rejects_with_their_line(
    tmp_path: Path, tiny_model: Path, num_fox_tokens: int
) -> None:
    lines = [
        OPEN | {"custom_id": "late", "min_tokens": NUM_POSITIONS},
        OPEN | {"custom_id": "bias", "logit_bias": {str(10**6): 1}},
        OPEN | {"custom_id": "stop", "stop_token_ids": [10**6]},
        LIMITED,
    ]
    found = submit_file(write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run"), model=str(tiny_model))
    assert [reject.line_number for reject in found.rejects] == [1, 2, 3]
    late, bias, stop = (reject.reason for reject in found.rejects)
    most = NUM_POSITIONS - num_fox_tokens
    assert late == f"field 'min_tokens': found {NUM_POSITIONS}, expected at most the {most} that may come"
    assert bias.startswith("field 'logit_bias': found token 1000000, the model's are 0 to ")
    assert stop.startswith("field 'stop_token_ids': found token 1000000, the model's are 0 to ")
    assert limits(found.run) == {"limited": 5}


def test_a_bias_of_a_token_without_a_text_is_a_reject(tmp_path: Path, tiny_model: Path) -> None:
    """Padding tokens never come, so a bias on them means nothing."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    first, ending = config["vocab_size"], config["vocab_size"] + 2
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": first + 4}))
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [config["eos_token_id"], ending]}))
    files = locate_model(str(model))
    codec = TextCodec(files)
    assert codec.textless_ids == (first, first + 1, first + 3)
    lines = [
        LIMITED | {"custom_id": str(n), "logit_bias": {"3": 1, str(n): -1}} for n in (first - 1, first + 3, ending)
    ]
    found, rejects = read_jobs(str(write_jobs(tmp_path / "jobs.jsonl", *lines)), 0)
    notes = LineNotes()
    records = list(make_records(found, notes, files, codec))
    assert ([record.job.custom_id for record in records], rejects) == ([str(first - 1), str(ending)], [])
    [reject] = notes.rejects
    reason = f"token {first + 3} has no text in this model's tokenizer, so it never comes"
    assert (reject.line_number, reject.reason) == (2, f"field 'logit_bias': {reason}")


def test_a_budget_of_thinking_needs_markers_which_the_run_keeps(tmp_path: Path, tiny_model: Path) -> None:
    line = LIMITED | {"thinking_token_budget": 3}
    path, place = write_jobs(tmp_path / "jobs.jsonl", line), str(tmp_path / "run")
    (reject,) = submit_file(path, place, model=str(tiny_model)).rejects
    assert (reject.line_number, reject.reason) == (
        1,
        "field 'thinking_token_budget': found 3, and no markers of thinking are known of this model; expected no such "
        "field, or a run with --thinking-markers",
    )
    kept = str(tmp_path / "kept")
    run = submit_file(path, kept, model=str(tiny_model), thinking_markers=("the fox", "lazy dog")).run
    assert [record.job.sampling.thinking_token_budget for record in run.jobs()] == [3]
    again = submit_file(path, kept)
    assert (again.rejects, again.run.jobs()) == ([], run.jobs())
    assert again.run.manifest.thinking_markers == ("the fox", "lazy dog")
    with pytest.raises(RunError, match=r"was made with thinking_markers .*; leave the option away"):
        submit_file(path, kept, thinking_markers=("fox", "dog"))


def test_markers_that_were_found_are_kept_and_so_is_that_there_were_none(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version's markers do not matter to an existing run."""
    thinker = Path(shutil.copytree(tiny_model, tmp_path / "thinker"))
    (thinker / "chat_template.jinja").write_text("<think>{{ messages[0].content }}</think>")
    path = write_jobs(tmp_path / "jobs.jsonl", LIMITED)
    for folder, kept in ((thinker, ("<think>", "</think>")), (tiny_model, ())):
        place = str(tmp_path / f"run-{len(kept)}")
        assert submit_file(path, place, model=str(folder)).run.manifest.thinking_markers == kept
        found = TextCodec(locate_model(str(folder)), kept).markers
        with monkeypatch.context() as patch:
            patch.setattr(thinking, "_own", lambda _: ("the", "fox"))
            manifest = Run.open(place).manifest
            assert computation_of(manifest, Settings()).thinking_markers == kept  # workers start with them
            assert TextCodec(locate_model(str(folder)), manifest.thinking_markers).markers == found
        assert found is None or found.texts == kept
    with pytest.raises(RunError, match=r"was made without thinking_markers, found \('fox', 'dog'\)"):
        submit_file(path, place, thinking_markers=("fox", "dog"))


def test_a_structure_that_can_t_be_met_is_a_reject_with_the_library_s_reason(tmp_path: Path, tiny_model: Path) -> None:
    """Equal structures in either field give the same job."""
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
    said: list[dict[str, Any]] = [
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"regex": "fox("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        {"structured_outputs": {"json": schema | {"properties": dict(reversed(schema["properties"].items()))}}},
    ]
    lines = [LIMITED | {"custom_id": str(number), "seed": 1} | fields for number, fields in enumerate(said)]
    submission = submit_file(write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run"), model=str(tiny_model))
    assert [(reject.line_number, reject.reason) for reject in submission.rejects] == [
        (3, "field 'structured_outputs.regex': unclosed group"),
        (4, "field 'response_format.json_schema.schema': found \"not\", not supported; expected no such keyword"),
    ]
    first, second, other = (record.job for record in submission.run.jobs())
    assert first.sampling == second.sampling
    assert first.model_copy(update={"custom_id": "1"}).job_id("m") == second.job_id("m")
    assert first.model_copy(update={"custom_id": "4"}).job_id("m") != other.job_id("m")  # the order is the output's


def test_who_submits_with_another_engine_is_told_how_the_run_goes_on_with_it(tmp_path: Path, tiny_model: Path) -> None:
    path, place = write_jobs(tmp_path / "jobs.jsonl", LIMITED), str(tmp_path / "run")
    submit_file(path, place, model=str(tiny_model), engine="auto")
    message = rf"^--engine suffix: `swiftbatch resume {place} --engine suffix` goes on with it; submit keeps .* auto"
    with pytest.raises(RunError, match=message):
        submit_file(path, place, engine="suffix")


DATED = "{% for m in messages %}{{ m.content }}{% endfor %} {{ strftime_now('%d %B %Y %H:%M') }}"
CHAT: dict[str, Any] = {"custom_id": "chat", "messages": [{"role": "user", "content": FOX}], "max_tokens": 3}


def dated(model: Path, text: str) -> list[int]:
    return TextCodec(locate_model(str(model))).encode(text, add_special_tokens=False)


def test_the_tokens_of_a_prompt_are_stored_once_and_travel_to_the_worker(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(DATED)
    path = write_jobs(tmp_path / "jobs.jsonl", CHAT, OPEN | {"n": 2}, {**LIMITED, "prompt": [[5, 6], [7]]})
    run = submit_file(path, str(tmp_path / "run"), model=str(model), clock="2026-11-28T23:30:00+14:00").run
    records = run.jobs()
    found = [unpacked(record.prompt_token_ids) for record in records]
    fox = TextCodec(locate_model(str(model))).encode(FOX)
    assert found == [dated(model, f"{FOX} 28 November 2026 23:30"), fox, fox, [5, 6], [7]]
    assert [len(ids) for ids in found] == [record.num_prompt_tokens for record in records]
    queue = load_queue(run, 5)
    bodies, ids = run.job_bodies(queue.places()), dict(zip((each.job_id for each in records), found, strict=True))
    while (job := queue.take("w", 0.0)) is not None:
        assert unpacked(bodies.at(job.entry.place).split(LINE_END, 2)[2]) == ids.pop(job.job_id)
    assert not ids


def test_all_files_of_a_run_have_its_clock(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(DATED)
    place, clock = str(tmp_path / "run"), "2026-11-28T23:30:00+14:00"
    submit_file(write_jobs(tmp_path / "a.jsonl", OPEN), place, model=str(model), clock=clock)
    later = submit_file(write_jobs(tmp_path / "b.jsonl", CHAT), place)
    assert later.run.manifest.clock == clock
    assert unpacked(later.run.jobs()[-1].prompt_token_ids) == dated(model, f"{FOX} 28 November 2026 23:30")
    with pytest.raises(RunError, match=r"was made with clock 2026-11-28T23:30:00\+14:00, found 2027"):
        submit_file(str(tmp_path / "b.jsonl"), place, clock="2027-01-01T00:00:00+00:00")
    said = submit_file(str(tmp_path / "a.jsonl"), str(tmp_path / "other"), model=str(model)).run.manifest
    assert said.fingerprint != later.run.manifest.fingerprint  # the template reads it
    assert abs(datetime.fromisoformat(said.clock).timestamp() - said.created) < 2


def test_runs_whose_template_reads_no_clock_have_one_fingerprint(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", OPEN)
    clocks = {name: f"202{name}-01-01T00:00:00+00:00" for name in "67"}
    runs = [submit_file(path, str(tmp_path / n), model=str(tiny_model), clock=said).run for n, said in clocks.items()]
    assert len({run.manifest.fingerprint for run in runs}) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ [1, 2] | random }}", "refuses them: it asks for the filter `random`, which gives another text each time"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1 GiB of memory"),
    ],
)
def test_a_template_that_can_t_be_rendered_twice_or_at_all_is_a_reject_by_name(
    tmp_path: Path, model: Path, template: str, reason: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    made = submit_file(write_jobs(tmp_path / "jobs.jsonl", OPEN, CHAT), str(tmp_path / "run"), model=str(model))
    assert [(each.line_number, each.reason) for each in made.rejects] == [
        (2, f"messages: the model's chat template {reason}")
    ]
    assert [record.job.custom_id for record in made.run.jobs()] == ["open"]


def test_a_thought_that_a_template_leaves_open_is_stored_with_the_prompt(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(DATED + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}")
    asked = [CHAT, CHAT | {"custom_id": "said", "add_generation_prompt": False}, OPEN, OPEN | {"prompt": "a</think>"}]
    lines = [each | {"custom_id": str(number)} for number, each in enumerate(asked)]
    run = submit_file(write_jobs(tmp_path / "jobs.jsonl", *lines), str(tmp_path / "run"), model=str(model)).run
    assert [record.last_marker for record in run.jobs()] == ["start", None, None, "end"]
