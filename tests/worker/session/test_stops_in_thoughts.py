"""Stop texts only count in the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.engine.engine import FEW_STEPS
from swiftbatch.worker.model.model_files import eos_token_ids_of, locate_model
from tests.worker.session.session_parts import body, claimed, digest, make_run, record, run_to_end, session, until
from tests.worker.session.test_rewind_resume import REWINDING
from tests.worker.session.test_thinking import BUDGET, ENGINES, MARKERS, chat, done, end_of, model

__all__ = ["model"]  # a fixture

CLOSED = {"thinking_token_budget": None, "thinking_end": "close", "ignore_eos": False}
LOOPS = REWINDING["repetition_detection"] | {"max_rewinds": 100}
KINDS: dict[str, dict[str, Any]] = {
    "a budget": {},
    "loops that are taken back": {
        **REWINDING,
        **{"thinking_token_budget": 60, "seed": 9, "repetition_detection": LOOPS},
    },
    "an end that closes": CLOSED,
}


def drawn_of(model: Path, kind: str) -> dict[str, Any]:
    [eos] = eos_token_ids_of(locate_model(str(model)))
    return KINDS[kind] | ({"logit_bias": {str(eos): 2.0}, "seed": 5} if KINDS[kind] is CLOSED else {})


def message_of(run: Run, job: JobRecord) -> dict[str, str]:
    message: dict[str, str] = body(run, job)["choices"][0]["message"]
    return message


def in_both(message: dict[str, str]) -> str:
    """Return a character of the thought's end that the answer has later."""
    thought, answer = message["reasoning_content"][-20:], message["content"]
    return next(each for each in answer[5:] if each in thought and each != "\ufffd" and each not in answer[:5])


@pytest.mark.sample(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_in_a_thought_ends_nothing_and_in_the_answer_ends_it(
    run: Run, tmp_path: Path, model: Path, kind: str, engine: str
) -> None:
    free = make_run(tmp_path / "free")
    unstopped = chat("fox", 160, **drawn_of(model, kind))
    done(free, model, unstopped, engine="autoregressive")
    whole = message_of(free, unstopped)
    if "repetition_detection" in KINDS[kind]:
        assert any(rewind.num_tokens < 40 for rewind in KeptLogs.of(free).read(unstopped.job_id).rewinds)
    stop = in_both(whole)
    job = chat("fox", 160, **drawn_of(model, kind), stop=(stop, "\ufffdnever\ufffd"))
    found = done(run, model, job, engine=engine)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert message_of(run, job) == whole | {"content": whole["content"].split(stop)[0]}
    for number, num_tokens in enumerate(moments(found, model)):
        disturbed, other = make_run(tmp_path / str(number)), ENGINES[number % len(ENGINES)]
        saved = {"checkpoint": ("state", "tokens")[number % 2], "thinking_markers": MARKERS}
        worker = session(disturbed, model, engine=engine, **saved)
        until(worker, job, num_tokens, claimed(disturbed, job))
        worker.drain(20.0)
        run_to_end(disturbed, model, job, engine=other, **saved)
        assert digest(disturbed, job) == digest(run, job)
        assert message_of(disturbed, job) == message_of(run, job)


def moments(found: dict[str, Any], model: Path) -> list[int]:
    """Return token numbers in the thought, in its marker, right after it, and in the answer."""
    num_thought = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    num_closed = num_thought + len(end_of(model)[0])
    places = (num_thought // 2, num_thought + 1, num_closed, num_closed + 2)
    return [each for each in places if each + FEW_STEPS < found["usage"]["completion_tokens"]]


def test_a_stop_text_with_a_marker_ends_the_thought_there(run: Run, model: Path) -> None:
    job = chat(stop=(MARKERS[1],))
    found = done(run, model, job, engine="suffix")
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == BUDGET + len(end_of(model)[0])
    assert message_of(run, job)["content"] == ""
    assert message_of(run, job)["reasoning_content"]


SPECIAL = "<|im_end|>"


@pytest.mark.parametrize("others", [(), ("never there",)])
def test_a_special_token_among_the_stop_texts_ends_a_text(
    run: Run, tmp_path: Path, model: Path, others: tuple[str, ...]
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL]})
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    [special] = [each for each in written["added_tokens"] if each["content"] == SPECIAL]
    special["id"] = 9  # instead of a token of the model
    names = {number: name for name, number in written["model"]["vocab"].items()}
    written["model"]["vocab"][SPECIAL] = written["model"]["vocab"].pop(names[9])
    written["model"]["merges"] = []
    (model / "tokenizer.json").write_text(json.dumps(written))
    drawn = {"logit_bias": {"9": 2.0}, "repetition_penalty": 1.0, "temperature": 1.0}
    jobs = [
        record(name, 200, drawn | said, prompt="a fox")
        for name, said in {
            "text": {"stop": (SPECIAL, *others)},
            "id": {"stop_token_ids": [9]},
            "all": {},
        }.items()
    ]
    run_to_end(run, model, *jobs, engine="suffix")
    by_text, by_id, unstopped = (body(run, job)["choices"][0] for job in jobs)
    assert by_text["finish_reason"] == "stop"
    assert by_text["text"] == by_id["text"] != unstopped["text"]
    assert by_text["token_ids_sha256"] == by_id["token_ids_sha256"]
    assert len(by_text["text"]) > 3
    assert unstopped["finish_reason"] == "length"
