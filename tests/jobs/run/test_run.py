from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.output_line import line_id
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import StoreError
from tests import ROOT
from tests.jobs.run.run_parts import FINISHED, MANIFEST, PROGRESS, failed_line, make_record, write_result


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    uri = str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_uri")
    return Run.planned(uri, MANIFEST).made()


RUN_JSON = """{
  "version": 2,
  "run_id": "run-1",
  "created": 1.5,
  "model": "embedded",
  "model_fingerprint": "f1",
  "text_fingerprint": "t1",
  "model_files": {},
  "model_commit": null,
  "engine": "suffix",
  "engine_options": [],
  "draft_model": null,
  "kv_offload": null,
  "dtype": "bfloat16",
  "kv_dtype": null,
  "lora": [],
  "lora_files": {},
  "lora_commits": {},
  "device": "cpu",
  "attention": "triton",
  "linear": "cublas",
  "num_rows": 64,
  "num_threads": 1,
  "seed": 7,
  "max_tokens": null,
  "loop_guard": null,
  "thinking_end": null,
  "logprobs_mode": "raw_logprobs",
  "sampling_defaults": "openai",
  "lenient_schemas": false,
  "plain_content": false,
  "thinking_markers": null,
  "clock": "2026-11-28T10:00:00+01:00",
  "reads_clock": false,
  "team": null,
  "versions": {
    "torch": "2.13.0"
  },
  "exactness": "exact",
  "cpu_capability": "AVX512"
}
"""
PROGRESS_JSON = """{
  "state": "running",
  "updated": 2.0,
  "started": 1.0,
  "jobs": {
    "pending": 1,
    "running": 1
  },
  "running": {},
  "max_tokens": {},
  "num_generated_tokens": 10,
  "num_total_tokens": 0,
  "worker_seconds": 0.0,
  "price_per_worker_hour": null,
  "reached_limit": null,
  "num_tokens_left": 0,
  "tokens_per_second": 2.5,
  "eta_seconds": null,
  "workers": [
    {
      "id": "w0",
      "host": "here",
      "pid": 12,
      "node_id": "",
      "numerics": "",
      "jobs": [
        "a"
      ],
      "metrics_address": null,
      "tokens_per_second": 0.0,
      "last_checkpoint": null
    }
  ],
  "num_starting_workers": 0,
  "num_preemptions": {},
  "num_resumes": {},
  "mean_acceptance_length": null,
  "num_tokens_by_draft": {},
  "num_read_tokens": 0,
  "num_copied_tokens": 0,
  "num_rejects": 0,
  "driver_host": "here",
  "driver_pid": 11,
  "driver_process": null,
  "epoch": 0
}
"""


def test_the_files_of_a_run_are_what_they_were_to_the_byte(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.write_progress(PROGRESS)
    assert run.store.read("run.json") == RUN_JSON.encode()
    assert run.store.read("progress.json") == PROGRESS_JSON.encode()
    assert Run.open(run.store.uri).manifest == MANIFEST


def test_a_run_that_names_no_sampling_defaults_keeps_openai_s(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST.model_copy(update={"sampling_defaults": "model"})).made()
    assert Run.open(run.store.uri).manifest.sampling_defaults == "model"
    run.store.write("run.json", RUN_JSON.replace('  "sampling_defaults": "openai",\n', "").encode())
    assert Run.open(run.store.uri).manifest.sampling_defaults == "openai"


def test_a_damaged_field_of_the_manifest_is_named(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.store.write("run.json", RUN_JSON.replace('"bfloat16"', '"int4"').encode())
    with pytest.raises(RunError, match="field 'dtype': found \"int4\", expected 'bfloat16' or 'float32'"):
        Run.open(run.store.uri)


def test_a_run_is_opened_with_the_manifest_it_was_made_with(run: Run) -> None:
    again = Run.planned(run.store.uri, MANIFEST.model_copy(update={"run_id": "run-2", "engine": "other"})).made()
    assert again.manifest == MANIFEST
    assert Run.open(run.store.uri).manifest == MANIFEST


@pytest.mark.parametrize(("field", "value"), [("model_fingerprint", "f2"), ("dtype", "float32"), ("kv_dtype", "int8")])
def test_a_run_of_another_model_or_dtype_is_refused(run: Run, field: str, value: str) -> None:
    run.write_error("j1", failed_line("broken"))  # from now on its dtype is fixed
    with pytest.raises(RunError, match=rf"made with .*expected {field} .*, found {value}; use the same"):
        Run.planned(run.store.uri, MANIFEST.model_copy(update={field: value})).made()


def test_a_folder_without_a_run_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run at .*nowhere: expected run\.json"):
        Run.open(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_with_results_of_something_else_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "output.jsonl").write_text("mine")
    with pytest.raises(RunError, match=r"holds output\.jsonl but no run\.json"):
        Run.planned(str(tmp_path), MANIFEST).made()
    assert (tmp_path / "output.jsonl").read_text() == "mine"


def test_a_job_file_may_lie_in_the_folder_that_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("{}")
    assert Run.planned(str(tmp_path), MANIFEST).made().jobs() == []


def test_an_unwritable_run_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file" / "run"), "/proc/swiftbatch-run"):
        with pytest.raises(StoreError, match=rf"cannot \w+ .*{folder}: .*; check that the folder") as caught:
            Run.planned(folder, MANIFEST).made()
        assert "\n" not in str(caught.value)


DAMAGED = [
    (b"{torn", "Expecting property name"),
    (b"[1]", "found a list, expected a JSON object"),
    (b'{"version": 1}', "found version 1, expected version 2; use the version of swiftbatch that made it"),
    (b'{"version": "2\\n"}', 'found version "2\\n", expected version 2'),
    (b"{}", "found version none, expected version 2"),
    (
        MANIFEST.model_dump_json().replace('"seed"', '"seeed"').encode(),
        'unknown field "seeed" (did you mean seed?), expected one of: version',
    ),
    (
        MANIFEST.model_dump_json().replace('"exact"', '"good"').encode(),
        "field 'exactness': found \"good\", expected 'exact'",
    ),
]


@pytest.mark.parametrize(("data", "problem"), DAMAGED)
def test_a_damaged_manifest_is_named_with_what_is_wrong(run: Run, data: bytes, problem: str) -> None:
    run.store.write("run.json", data)
    with pytest.raises(RunError) as caught:
        Run.open(run.store.uri)
    assert f"cannot use run.json in {run.store.uri}: " in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_jobs_come_back_as_they_went_in_and_in_order(run: Run) -> None:
    chat = Job(
        custom_id="talk \u2028 \U0001f600",
        url="/v1/chat/completions",
        messages=[{"role": "user", "content": "Hello"}],
        sampling=SamplingParams(max_tokens=5, seed=2**63 - 1, temperature=0.1, min_p=0.3),
    )
    records = [make_record("b", 1), JobRecord(chat.job_id("f1"), chat, 2, 9), make_record("a", 3)]
    run.add_jobs(records)
    assert Run.open(run.store.uri).jobs() == records


def test_adding_jobs_again_adds_only_new_ones_after_the_others(run: Run) -> None:
    run.add_jobs([])
    assert run.jobs() == []
    run.add_jobs([make_record("a", 1), make_record("b", 2)])
    run.add_jobs(
        [make_record("new", 1), make_record("b", 9), make_record("a", 9, prompt="Twice"), make_record("new", 1)]
    )
    found = [(record.job.custom_id, record.line_number, record.job.prompt) for record in run.jobs()]
    assert found == [("a", 1, "Once"), ("b", 2, "Once"), ("new", 1, "Once"), ("a", 9, "Twice")]


@pytest.mark.parametrize("data", [b"", b"PAR1 torn", None])
def test_a_damaged_job_table_is_named(run: Run, data: bytes | None) -> None:
    run.add_jobs([make_record("a")])
    whole = run.store.read("jobs.parquet") or b""
    run.store.write("jobs.parquet", whole[: len(whole) // 2] if data is None else data)
    with pytest.raises(RunError, match=r"cannot use jobs\.parquet in .*"):
        run.jobs()


def test_rejects_come_back_as_they_went_in(run: Run) -> None:
    assert run.rejects() == []
    rejects = [Reject(1, None, "reason \u2028 one"), Reject(7, "a\rb", "two")]
    run.write_rejects([Reject(3, "old", "from the submission before")])
    run.write_rejects(rejects)
    assert run.rejects() == rejects
    assert len(run.store.read("rejects.jsonl").decode().splitlines()) == 2


def test_a_finished_result_is_never_overwritten(run: Run) -> None:
    assert write_result(run, "a-1", FINISHED)
    assert not write_result(run, "a-1", FINISHED | {"custom_id": "second"})
    assert run.result("a-1") == {"id": line_id("a-1")} | FINISHED
    assert run.ended()[0] == {"a-1"}
    assert run.result("b-1") is None


def test_an_error_may_be_replaced_and_a_result_makes_up_for_it(run: Run) -> None:
    run.write_error("a-1", failed_line("1"))
    run.write_error("a-1", failed_line("2"))
    run.write_error("b-1", failed_line("3"))
    assert run.error("a-1") == failed_line("2")
    assert run.ended()[1] == {"a-1", "b-1"}
    write_result(run, "a-1", FINISHED)
    assert run.ended()[1] == {"b-1"}


def test_cleared_errors_make_jobs_pending_again_and_results_stay(run: Run) -> None:
    run.write_error("a-1", {})
    run.write_error("b-1", {})
    write_result(run, "c-1", FINISHED)
    assert run.clear_errors() == {"a-1", "b-1"}
    assert run.ended()[1] == set()
    assert run.error("a-1") is None
    assert run.ended()[0] == {"c-1"}


def test_progress_comes_back_as_it_went_in(run: Run) -> None:
    assert run.progress() is None
    run.write_progress(PROGRESS)
    run.write_progress(PROGRESS.model_copy(update={"state": "finished"}))
    assert Run.open(run.store.uri).progress() == PROGRESS.model_copy(update={"state": "finished"})


def test_requests_to_cancel_are_seen_until_they_are_cleared(run: Run) -> None:
    assert run.cancel_requests() == (False, set())
    run.request_cancel("a-1")
    assert run.cancel_requests() == (False, {"a-1"})
    run.request_cancel(None)
    assert Run.open(run.store.uri).cancel_requests() == (True, {"a-1"})
    run.clear_cancel()
    assert run.cancel_requests() == (False, set())
    run.clear_cancel()


def test_a_job_id_that_leads_out_of_the_folder_is_refused(run: Run) -> None:
    for call in (run.request_cancel, run.error):
        with pytest.raises(StoreError, match="refused the path"):
            call("../../x")
    assert run.result("../../x") is None


def test_opening_a_local_run_takes_no_heavy_import(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.write_progress(PROGRESS)
    program = (
        "import sys; from swiftbatch.jobs.run.run import Run\n"
        "run = Run.open(sys.argv[1]); run.progress(); run.ended()[0]\n"
        "print({'pyarrow', 'numpy', 'torch', 'ray'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, run.store.uri]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
