from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import TokenLog
from swiftbatch.jobs.job import packed
from swiftbatch.jobs.run.output_line import tokens_sha256
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.scheduler.runs.run_manifest import versions
from swiftbatch.scheduler.runs.scoring import scored_results
from swiftbatch.scheduler.runs.verification import SPAN, VerificationReport, chosen_jobs, verify_run
from swiftbatch.worker.forward.hardware import cpu_capability
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.commands.command_parts import invoke, refusal
from tests.scheduler.runs.verification_parts import finished, rewritten
from tests.worker.session.session_parts import LOOPS_OF_80, record

LONG = 700  # tokens: three spans


def _verified(run: Run, *custom_ids: str, **options: Any) -> VerificationReport:
    return verify_run(run, 1.0, 0, custom_ids, **options)


def _forged(folder: Path, model: Path, change: Callable[[list[int], dict[str, Any]], None]) -> Run:
    """Return a run whose only result has other tokens or another text, with hash, counts and checksums that fit."""
    run = finished(folder, model, record("long", LONG))
    [job_id] = run.job_ids()
    line = run.result(job_id)
    body = line["response"]["body"]
    [choice] = body["choices"]
    before = KeptLogs.of(run).read(job_id).token_ids.tolist()
    token_ids = list(before)
    change(token_ids, choice)
    if token_ids != before:
        forged = np.asarray(token_ids, np.uint32)
        KeptLogs.of(run).write(job_id, TokenLog(forged))
        choice["token_ids_sha256"], body["usage"]["completion_tokens"] = tokens_sha256(forged), len(forged)
        choice["text"] = TextCodec(locate_model(run.manifest.model)).decode(token_ids)
    run.store.delete_folder("results")
    Run.open(run.store.uri).write_segment("forged", ResultSegment([(job_id, line)]))
    return Run.open(run.store.uri)


@pytest.mark.parametrize("engine", ["autoregressive", "token-recycling", "prompt-lookup"])
def test_honest_results_are_exact(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    jobs = [
        record("long", LONG),
        record("penalties", 300, {"frequency_penalty": 0.5, "min_p": 0.02, "bad_words": ["the"], "min_tokens": 5}),
        record("greedy", 100, {"temperature": 0.0}),
        record("logprobs", 100, {"logprobs": 2}),
        record("ends", 400, {"ignore_eos": False, "stop": ["q", "zz"], "temperature": 2.0}),
        record("loops", 300, LOOPS_OF_80),
        record("structure", 100, {"ignore_eos": False, "structured_outputs": {"regex": "[a-z]{5,60}"}}),
    ]
    run = finished(tmp_path / "run", tiny_model, *jobs, engine=engine)
    found = _verified(run)
    assert (found.verdict, found.findings, found.num_jobs) == ("exact", (), len(jobs))
    assert found.num_tokens == found.num_tokens_of_run


def _change_token(token_ids: list[int], _choice: dict[str, Any]) -> None:
    token_ids[500] = 1 + token_ids[500] % 5


def test_a_changed_token_is_found_at_its_place(tmp_path: Path, tiny_model: Path) -> None:
    found = _verified(_forged(tmp_path / "run", tiny_model, _change_token))
    assert found.verdict == "differs"
    assert (found.findings[0].what, found.findings[0].position) == ("token", 500)
    assert found.findings[0].margin > 0


@pytest.mark.parametrize("num_cut", [1, 300])
def test_an_output_that_was_cut_is_found(tmp_path: Path, tiny_model: Path, num_cut: int) -> None:
    def cut(token_ids: list[int], _choice: dict[str, Any]) -> None:
        del token_ids[-num_cut:]

    [finding] = _verified(_forged(tmp_path / "run", tiny_model, cut)).findings
    assert (finding.what, finding.position, finding.recorded) == ("end", LONG - num_cut, None)


CHAT = {"url": "/v1/chat/completions", "prompt": None, "messages": ({"role": "user", "content": "the quick"},)}
RULED = {"logprobs": 3, "structured_outputs": {"regex": "[a-z]{90,120}"}, "ignore_eos": False}
REWINDS = {**LOOPS_OF_80, "logprobs": 2}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_honest_logprobs_are_exact(tmp_path: Path, tiny_model: Path, mode: LogprobsMode) -> None:
    jobs = [
        record("long", LONG, {"logprobs": 4, "top_k": 9, "return_token_ids": True}),
        record("none", 300, {"logprobs": 0, "frequency_penalty": 0.5}),
        record("chat", 300, {"logprobs": 5, "min_p": 0.05}, **CHAT),
        record("ruled", 120, RULED),
        record("loops", 300, REWINDS),
    ]
    run = finished(tmp_path / "run", tiny_model, *jobs, logprobs_mode=mode)
    run.manifest = run.manifest.model_copy(update={"logprobs_mode": mode})
    found = _verified(run)
    assert (found.verdict, found.findings, found.num_jobs) == ("exact", (), len(jobs))
    other = {"raw_logprobs": "processed_logprobs", "processed_logprobs": "raw_logprobs"}
    run.manifest = run.manifest.model_copy(update={"logprobs_mode": other[mode]})
    assert {each.what for each in _verified(run).findings} == {"logprobs"}


def _shift(logprobs: dict[str, Any]) -> None:
    logprobs["token_logprobs"][500] = float(np.nextafter(np.float32(logprobs["token_logprobs"][500]), np.float32(0)))


def _shift_top(logprobs: dict[str, Any]) -> None:
    name = min(logprobs["top_logprobs"][500])
    logprobs["top_logprobs"][500][name] -= 0.25


def _rename(logprobs: dict[str, Any]) -> None:
    logprobs["tokens"][500] = "x"


def _leave_out(logprobs: dict[str, Any]) -> None:
    logprobs["top_logprobs"][500].popitem()


@pytest.mark.parametrize(
    ("change", "sizes"),
    [(_shift, (0.0, 1e-5)), (_shift_top, (0.2, 0.3)), (_rename, None), (_leave_out, (0.0, 50.0))],
)
def test_a_changed_logprob_is_found_at_its_place(
    tmp_path: Path, tiny_model: Path, change: Callable[[dict[str, Any]], None], sizes: tuple[float, float] | None
) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG, {"logprobs": 4}))
    [finding] = _verified(rewritten(run, lambda choice: change(choice["logprobs"]))).findings
    assert (finding.what, finding.position) == ("logprobs", 500)
    if sizes is None:
        assert finding.margin is None
    else:
        assert sizes[0] < finding.margin < sizes[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice.pop("logprobs"),
        lambda choice: choice["logprobs"]["tokens"].pop(),
        lambda choice: choice["logprobs"]["text_offset"].reverse(),
        lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(3, "x"),
        lambda choice: choice["logprobs"].update(top_logprobs=None),
        lambda choice: choice["logprobs"]["tokens"].__setitem__(3, ["x"]),
        lambda choice: [values.clear() for values in choice["logprobs"].values()],
    ],
)
def test_logprobs_of_another_form_are_found(
    tmp_path: Path, tiny_model: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    run = rewritten(finished(tmp_path / "run", tiny_model, record("a", 40, {"logprobs": 1})), change)
    [finding] = _verified(run).findings
    assert (finding.what, finding.position, finding.margin) == ("logprobs", None, None)
    done = invoke("verify", run.store.uri)
    assert (done.exit_code, "missing, or do not fit its tokens" in done.output) == (1, True)


def test_a_changed_logprob_of_a_chat_without_kept_tokens_is_found(tmp_path: Path, tiny_model: Path) -> None:
    chat = {"logprobs": 2, "ignore_eos": False, "temperature": 2.0, "stop": ("q",)}
    run = finished(tmp_path / "run", tiny_model, record("a", 400, chat, **CHAT))

    def change(choice: dict[str, Any]) -> None:
        choice["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] -= 1.0

    run = rewritten(run, change)
    [finding] = _verified(run).findings
    assert (finding.what, finding.position) == ("logprobs", 0)
    assert "a log-probability of token 1 is not this model's, by 1\n" in invoke("verify", run.store.uri).output


def test_other_numerics_bound_the_differences_of_logprobs(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(choice: dict[str, Any], by: float) -> None:
        choice["logprobs"]["token_logprobs"][9] -= by

    monkeypatch.setattr("swiftbatch.scheduler.runs.verification._computes_alike", lambda _: False)
    for by, verdict in ((0.24, "exact up to ties"), (0.26, "differs")):
        run = finished(tmp_path / verdict, tiny_model, record("a", 40, {"logprobs": 3}))
        assert _verified(rewritten(run, partial(shifted, by=by))).verdict == verdict


def test_an_attempt_with_other_numerics_may_tie(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 40, {"logprobs": 3}))
    [job_id] = run.job_ids()
    line = run.result(job_id)
    body = line["response"]["body"]
    body["choices"][0]["logprobs"]["token_logprobs"][9] -= 0.1
    for numerics, verdict in ((body["metrics"]["attempts"][0]["numerics"], "differs"), ("other", "exact up to ties")):
        body["metrics"]["attempts"][0]["numerics"] = numerics
        run.store.delete_folder("results")
        Run.open(run.store.uri).write_segment("forged", ResultSegment([(job_id, line)]))
        again = Run.open(run.store.uri)
        again.manifest = again.manifest.model_copy(update={"cpu_capability": cpu_capability(), "versions": versions()})
        assert _verified(again).verdict == verdict


def test_a_changed_token_among_logprobs_is_found_at_its_place(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 300, {"logprobs": 2, "return_token_ids": True}))

    def change(choice: dict[str, Any]) -> None:
        for place in (100, 101, 290):
            choice["token_ids"][place] = 1 + choice["token_ids"][place] % 5
        choice["token_ids_sha256"] = tokens_sha256(np.asarray(choice["token_ids"], np.uint32))

    found = _verified(rewritten(run, change)).findings
    assert [each.position for each in found if each.what == "token"][:2] == [100, 101]
    assert {each.what for each in found} == {"token", "text", "logprobs"}


def test_logprobs_that_were_added_later_are_compared(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG, {"return_token_ids": True}))
    [line] = scored_results(run, 3)
    added = line["response"]["body"]["choices"][0]["logprobs"]
    run = rewritten(run, lambda choice: choice.update(logprobs=added))
    assert _verified(run).verdict == "exact"
    _shift(added)
    [finding] = _verified(rewritten(run, lambda choice: choice.update(logprobs=added))).findings
    assert (finding.what, finding.position) == ("logprobs", 500)


def _change_text(_token_ids: list[int], choice: dict[str, Any]) -> None:
    choice["text"] = "x" + choice["text"]


def test_a_changed_text_is_found(tmp_path: Path, tiny_model: Path) -> None:
    assert [finding.what for finding in _verified(_forged(tmp_path / "run", tiny_model, _change_text)).findings] == [
        "text"
    ]


def test_a_changed_text_without_kept_tokens_is_found(tmp_path: Path, tiny_model: Path) -> None:
    run = _forged(tmp_path / "run", tiny_model, _change_text)
    KeptLogs.of(run).clear()
    [finding] = _verified(run).findings
    assert (finding.what, finding.position) in (("output", 0), ("text", None))


def test_a_token_log_that_was_changed_is_found(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG))
    [job_id] = run.job_ids()
    KeptLogs.of(run).write(job_id, TokenLog(np.arange(LONG, dtype=np.uint32) % 9))
    assert [finding.what for finding in _verified(run).findings] == ["log"]


def test_token_ids_in_a_result_are_drawn_again_without_any_other_record_of_them(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG, {"return_token_ids": True, "seed": 4}))
    monkeypatch.setattr(KeptLogs, "read", None)
    assert _verified(run).verdict == "exact"
    [job_id] = run.job_ids()
    line = run.result(job_id)
    line["response"]["body"]["choices"][0]["token_ids"][300] += 1
    run.store.delete_folder("results")
    run.write_segment("forged", ResultSegment([(job_id, line)]))
    assert [finding.what for finding in _verified(Run.open(run.store.uri)).findings] == ["log"]


def test_one_changed_weight_is_found(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG), record("b", LONG))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 4.0
    save_file(weights, other / "model.safetensors")
    assert _verified(run, model=str(tiny_model)).verdict == "exact"
    assert _verified(run, model=str(other)).verdict == "differs"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("chat_template.jinja", lambda text: text + "."),
        ("config.json", lambda text: json.dumps({**json.loads(text), "rms_norm_eps": 0.1})),
        ("tokenizer.json", lambda text: text + " "),
        ("generation_config.json", lambda text: '{"temperature": 0.5}'),
    ],
)
def test_a_model_with_another_file_is_refused_by_its_name(
    tmp_path: Path, tiny_model: Path, name: str, change: Callable[[str], str]
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    run, file = finished(tmp_path / "run", model, record("a", 30)).store.uri, model / name
    file.write_text(change(file.read_text() if file.exists() else ""))
    message = refusal("verify", run)
    assert f"{file} is not the file that was expected" in message
    assert message.count("\n") <= 1


@pytest.mark.parametrize("text", ["It was", "the quick brown long "])
def test_another_prompt_is_found(tmp_path: Path, tiny_model: Path, text: str) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG))
    job = next(run.records())
    other = Run.planned(str(tmp_path / "other"), run.manifest).made()
    other.add_jobs([replace(job, job=job.job.model_copy(update={"prompt": text}))])
    for folder in ("results", "tokens"):
        shutil.copytree(tmp_path / "run" / folder, tmp_path / "other" / folder)
    assert [each.what for each in _verified(Run.open(other.store.uri)).findings] == ["job"]


def test_tokens_of_another_prompt_are_found(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG))
    job = next(run.records())
    other = Run.planned(str(tmp_path / "other"), run.manifest).made()
    other.add_jobs([replace(job, prompt_token_ids=packed([9] * job.num_prompt_tokens))])
    for folder in ("results", "tokens"):
        shutil.copytree(tmp_path / "run" / folder, tmp_path / "other" / folder)
    assert "job" in [each.what for each in _verified(Run.open(other.store.uri)).findings]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("finish_reason", "stop", "end"),
        ("index", 3, "line"),
        ("prompt_token_ids", [9], "line"),
        ("token_ids_sha256", "a", "log"),
    ],
)
def test_a_changed_field_of_a_choice_is_found(
    tmp_path: Path, tiny_model: Path, field: str, value: object, what: str
) -> None:
    run = _forged(tmp_path / "run", tiny_model, lambda _, choice: choice.update({field: value}))
    assert what in [each.what for each in _verified(run).findings]


def test_loops_that_rewind_are_exact_however_long_they_are(tmp_path: Path, tiny_model: Path) -> None:
    rewinding = {**LOOPS_OF_80, "repetition_detection": {"max_pattern_size": 1, "min_count": 200, "action": "rewind"}}
    run = finished(tmp_path / "run", tiny_model, record("loops", 900, rewinding))
    [line] = run.joined_lines()
    assert line["response"]["body"]["metrics"]["num_rewinds"] > 0
    assert _verified(run).verdict == "exact"


def test_another_seed_is_found(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("long", LONG))
    job = next(run.records())
    other = Run.planned(str(tmp_path / "other"), run.manifest).made()
    sampling = job.job.sampling.model_copy(update={"seed": 4})
    other.add_jobs([replace(job, job=job.job.model_copy(update={"sampling": sampling}))])
    for folder in ("results", "tokens"):
        shutil.copytree(tmp_path / "run" / folder, tmp_path / "other" / folder)
    assert _verified(Run.open(other.store.uri)).verdict == "differs"


def test_the_sample_is_drawn_over_all_tokens_and_repeats() -> None:
    num_tokens = np.asarray([100, 0, 100_000, 1_000], np.int64)
    chosen = chosen_jobs(num_tokens, 0.25, seed=1)
    spans = {(job.row, span.start, span.stop) for job in chosen for span in job.spans}
    assert len(spans) == sum(len(job.spans) for job in chosen) == 99  # a quarter of 1 + 391 + 4 spans
    assert all(stop - start <= SPAN and stop <= num_tokens[row] for row, start, stop in spans)
    assert chosen == chosen_jobs(num_tokens, 0.25, seed=1) != chosen_jobs(num_tokens, 0.25, seed=2)
    assert {row for row, _, _ in spans} >= {2}
    whole = chosen_jobs(num_tokens, 1.0, seed=1)
    assert sum(len(span) for job in whole for span in job.spans) == num_tokens.sum()


def test_the_command_says_what_it_found(tmp_path: Path, tiny_model: Path) -> None:
    run, report = finished(tmp_path / "run", tiny_model, record("long", LONG)), tmp_path / "report.json"
    done = invoke("verify", run.store.uri, "--json", str(report), "--sample-seed", "0")
    assert done.exit_code == 0
    assert done.output == f"exact: {LONG} tokens of 3 spans in 1 job are what this model draws (sample seed 0)\n"
    assert json.loads(report.read_text())["verdict"] == "exact"
    assert "expected a part of the run's tokens" in refusal("verify", run.store.uri, "--sample", "3")
    assert "no job 'absent'" in refusal("verify", run.store.uri, "absent")


def test_a_signed_report_has_a_signature_of_its_bytes(tmp_path: Path, tiny_model: Path) -> None:
    run, report = finished(tmp_path / "run", tiny_model, record("a", 30)), tmp_path / "report.json"
    key, path = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert invoke("verify", run.store.uri, "--json", str(report), "--sign", str(path)).exit_code == 0
    signature = Path(f"{report}.sig").read_bytes()
    key.public_key().verify(signature, report.read_bytes())
    with pytest.raises(InvalidSignature):
        key.public_key().verify(signature, report.read_bytes() + b" ")


def test_a_key_that_cannot_sign_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    run, path = finished(tmp_path / "run", tiny_model, record("a", 30)).store.uri, tmp_path / "key.pem"
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert "is no Ed25519 key" in refusal("verify", run, "--json", str(tmp_path / "report"), "--sign", str(path))
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert "expected --json with it" in refusal("verify", run, "--sign", str(path))


def test_the_command_names_the_first_differing_token(tmp_path: Path, tiny_model: Path) -> None:
    done = invoke("verify", _forged(tmp_path / "run", tiny_model, _change_token).store.uri, "long")
    assert done.exit_code == 1
    assert "job long: token 501 is " in done.output
    assert f" in 1 job, among {LONG} tokens of 3 spans in 1 job" in done.output
