from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord, packed
from swiftbatch.jobs.run.output_line import tokens_sha256
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import run_to_ends
from tests.worker.session.session_parts import (
    digest,
    have_caches_loaded,
    make_run,
    preempted,
    record,
    run_to_end,
    undisturbed_digest,
)

BEGUN = tuple(range(5, 45)) * 2
DRAWN = {"frequency_penalty": 0.3, "min_tokens": 60}  # which count the given tokens, too


def _fork() -> JobRecord:
    return record("fork", 200, DRAWN, begun_ids=BEGUN)


def _drawn_plainly(model: Path) -> str:
    """Return the digest of a sequence that was set back to the given tokens and drawn one token at a time."""
    files = locate_model(str(model))
    codec, target = TextCodec(files), TargetModel.load(files, "float32", "cpu")
    job = _fork().job
    empty = Sequence("plain", codec.prompt_of(job).token_ids, job.sampling, target.vocab_size)
    sequence = empty.with_output(list(BEGUN))
    run_to_ends(Engine(target, AutoregressiveDrafter()), sequence)
    return tokens_sha256(sequence.output_ids)


def test_a_fork_goes_on_behind_its_given_tokens_as_plain_sampling_does(tmp_path: Path, tiny_model: Path) -> None:
    expected = _drawn_plainly(tiny_model)
    assert undisturbed_digest(tmp_path / "plain", tiny_model, _fork()) == expected
    run = make_run(tmp_path / "run")
    run_to_end(run, tiny_model, _fork())
    assert digest(run, _fork()) == expected
    assert undisturbed_digest(tmp_path / "other", tiny_model, record("fork", 200, DRAWN)) != expected


@pytest.mark.parametrize("loads", [True, False])
def test_a_preempted_fork_gives_the_same_tokens(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    have_caches_loaded(monkeypatch, loads)
    run = make_run(tmp_path / "run")
    for num_tokens in (90, 130):
        preempted(run, tiny_model, _fork(), num_tokens)
    run_to_end(run, tiny_model, _fork())
    assert digest(run, _fork()) == _drawn_plainly(tiny_model)


def test_a_fork_that_lost_its_log_begins_again_with_its_given_tokens(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "run")
    preempted(run, tiny_model, _fork(), 120)
    CheckpointStore.of(run).clear(_fork().job_id)
    run_to_end(run, tiny_model, _fork())
    assert digest(run, _fork()) == _drawn_plainly(tiny_model)


def test_given_tokens_make_another_job() -> None:
    assert _fork().job_id != record("fork", 200, DRAWN).job_id
    assert packed(list(BEGUN)) not in _fork().prompt_token_ids
