"""Log-probabilities of prompts, and prompts before their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftbatch.jobs.job import unpacked
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.verification import verify_run
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.replay.scoring import Scorer
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import (
    body,
    have_caches_loaded,
    make_run,
    preempted,
    record,
    run_at,
    run_to_end,
)
from tests.worker.session.test_rewind_resume import OFTEN, REWINDING, moments, wait_for_files

__all__ = ["moments"]

LONG = "the quick brown fox jumps over the lazy dog and " * 20  # reads several tiles


def choices(run: Run) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0] for line in run.joined_lines()}


def test_an_echo_is_the_prompt_and_then_the_same_output_with_log_probabilities_of_both(
    tmp_path: Path, tiny_model: Path
) -> None:
    jobs = [
        record("plain", 30, {"logprobs": 2}, prompt=LONG),
        record("echo", 30, {"logprobs": 2, "echo": True}, prompt=LONG),
        record("alone", 1, {"logprobs": 2, "echo": "alone"}, prompt=LONG),
    ]
    run = finished(tmp_path / "run", tiny_model, *jobs)
    found, ids = choices(run), unpacked(run.jobs()[0].prompt_token_ids)
    plain, echo, alone = (found[name]["logprobs"] for name in ("plain", "echo", "alone"))
    assert found["echo"]["text"] == LONG + found["plain"]["text"]
    assert found["echo"]["token_ids_sha256"] == found["plain"]["token_ids_sha256"]
    assert found["alone"]["text"] == LONG
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echo[name][len(ids) :] == plain[name]
        assert echo[name][: len(ids)] == alone[name]
    assert echo["text_offset"] == [*alone["text_offset"], *(len(LONG) + each for each in plain["text_offset"])]
    scored = Scorer(TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")).logprobs(ids[:1], ids[1:], 2)
    assert alone["token_logprobs"] == [None, *scored.logprobs.tolist()]
    assert alone["top_logprobs"][0] is None
    assert verify_run(run, 1.0, 1).verdict == "exact"


def test_a_prompt_has_the_log_probabilities_and_ranks_that_transformers_gives(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 5, {"prompt_logprobs": 3}, prompt=LONG))
    [choice], [job] = choices(run).values(), run.jobs()
    ids, codec = unpacked(job.prompt_token_ids), TextCodec(locate_model(str(tiny_model)))
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    rows = torch.log_softmax(logits.double(), -1)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for row, token_id, shown in zip(rows, ids[1:], others, strict=False):
        own, order = shown[str(token_id)], row.argsort(descending=True)
        assert own["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        assert own["decoded_token"] == codec.token_bytes(token_id).decode()
        assert abs(own["rank"] - 1 - int((order == token_id).nonzero())) <= 1
        assert next(iter(shown)) == str(token_id)
        ranks = {each["rank"] for each in shown.values()}
        assert ranks == {1, 2, 3, own["rank"]}
        assert [each["logprob"] for each in sorted(shown.values(), key=lambda each: int(each["rank"]))][:3] == (
            pytest.approx(row[order[:3]].tolist(), abs=1e-3)
        )
    assert "logprobs" not in choice


def test_jobs_with_one_prompt_have_one_result_though_one_of_them_read_it(tmp_path: Path, tiny_model: Path) -> None:
    asked = {"prompt_logprobs": 1, "echo": True, "logprobs": 0}
    alone = choices(finished(tmp_path / "alone", tiny_model, record("a", 20, asked, prompt=LONG)))["a"]
    others = [record(name, 20, prompt=LONG) for name in ("b", "c")]
    run = finished(tmp_path / "run", tiny_model, *others, record("a", 20, asked, prompt=LONG))
    assert choices(run)["a"] == alone
    assert choices(run)["b"]["text"] == alone["text"].removeprefix(LONG)


@pytest.mark.long
@pytest.mark.parametrize("loads", [True, False])
def test_a_kill_at_any_moment_changes_no_bit(
    tmp_path: Path, tiny_model: Path, moments: list[Path], monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    asked = {"seed": 1, "logprobs": 2, "echo": True, "prompt_logprobs": 1}
    job = record("fox", 60, drawn=REWINDING | asked, prompt=LONG)
    run = make_run(tmp_path / "run")
    wait_for_files(monkeypatch)
    run_to_end(run, tiny_model, job, **OFTEN | {"checkpoint_tokens": 3})
    expected = body(run, job)["choices"]
    assert body(run, job)["metrics"]["num_rewinds"] > 0
    monkeypatch.undo()
    have_caches_loaded(monkeypatch, loads)
    for number, moment in enumerate(moments[::5]):
        again = run_at(moment, tmp_path / f"again-{number}")
        run_to_end(again, tiny_model, job)
        assert body(again, job)["choices"] == expected, moment


def test_a_job_that_lost_its_result_alone_reads_its_prompt(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record("fox", 40, drawn={"prompt_logprobs": 1}, prompt=LONG)
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("swiftbatch.worker.session.session.may_rewind", lambda sequence: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            preempted(run, tiny_model, job, 41, checkpoint_tokens=1)
    run_to_end(run, tiny_model, job)
    undisturbed = make_run(tmp_path / "undisturbed")
    run_to_end(undisturbed, tiny_model, job)
    assert body(run, job)["choices"] == body(undisturbed, job)["choices"]


def test_chunks_beside_other_rows_give_the_same_bits(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's prefill fills the rest of forwards with known tokens."""
    asked = {"logprobs": 1, "echo": True, "prompt_logprobs": 0}
    jobs = [record("a", 20, prompt=LONG), record("b", 20, asked, prompt=f"the lazy dog {LONG}")]
    expected = choices(finished(tmp_path / "run", tiny_model, *jobs))
    monkeypatch.setattr(NativeForwards, "rows_per_forward", 32)
    found = choices(finished(tmp_path / "chunks", tiny_model, *jobs))
    assert {name: found[name] for name in "ab"} == {name: expected[name] for name in "ab"}
