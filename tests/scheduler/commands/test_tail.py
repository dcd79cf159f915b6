from __future__ import annotations

from pathlib import Path

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs, Rewind, TokenLog
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.run_watch import TAKEN_BACK, follow_text
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.scheduler.commands.command_parts import finish, invoke, pretend_to_run, refusal


def test_tail_reads_the_token_log_of_an_unfinished_job_and_the_text_of_a_finished_one(
    run: Run, tiny_model: Path
) -> None:
    record = run.jobs()[0]
    codec = TextCodec(locate_model(str(tiny_model)))
    checkpoints = CheckpointStore.of(run)
    token_ids = np.array(codec.encode("jumps over the lazy dog"), dtype=np.uint32)
    assert invoke("tail", run.store.uri, "a").output == "\n"
    checkpoints.write_tokens(record.job_id, claim(checkpoints, record.job_id, "w1"), token_ids)
    assert invoke("tail", run.store.uri, "a").output == "jumps over the lazy dog\n"
    finish(run, "a", "the whole text")
    assert invoke("tail", run.store.uri, "a", "--follow").output == "the whole text\n"
    assert "no job 'z'" in refusal("tail", run.store.uri, "z")


def test_tail_finds_a_running_job_s_tokens_in_its_worker_s_file(run: Run, tiny_model: Path) -> None:
    record, codec, logs = run.jobs()[0], TextCodec(locate_model(str(tiny_model))), PackedLogs.of(run)
    start = AttemptStart(worker_id="w1", claimed=1.0, numerics="cpu", attempt=1)
    for number, text in enumerate(("jumps over", "jumps over the lazy dog")):
        log = TokenLog(np.array(codec.encode(text), dtype=np.uint32))
        logs.write(f"w1-x-{number:06d}.logs", [logs.entry(record.job_id, 1_000_001, start, log, None)])
    assert invoke("tail", run.store.uri, "a").output == "jumps over the lazy dog\n"  # its driver is dead
    assert invoke("tail", run.store.uri, "b").output == "\n"


def test_tail_shows_characters_as_soon_as_they_are_sure(run: Run, tiny_model: Path) -> None:
    """A broken character becomes U+FFFD; the start of a possible one is withheld."""
    record, codec = run.jobs()[0], TextCodec(locate_model(str(tiny_model)))
    checkpoints = CheckpointStore.of(run)
    attempt = claim(checkpoints, record.job_id, "w1")
    dash, begin = codec.encode("\u2013", add_special_tokens=False), codec.encode("the fox")
    for bytes_behind, text in (
        (dash[:1], "the fox"),
        (dash, "the fox\u2013"),
        ([*dash[1:], *dash[:2]], "the fox\ufffd\ufffd"),
    ):
        checkpoints.write_tokens(record.job_id, attempt, np.array([*begin, *bytes_behind], dtype=np.uint32))
        assert invoke("tail", run.store.uri, "a").output == f"{text}\n"


def test_tail_tells_of_a_loop_that_was_taken_back(run: Run, tiny_model: Path) -> None:
    pretend_to_run(run)
    job_id, checkpoints = run.jobs()[0].job_id, CheckpointStore.of(run)
    attempt, codec = claim(checkpoints, job_id, "w1"), TextCodec(locate_model(str(tiny_model)))
    texts = ["the fox the fox", "the", "the fox jumps", "the fox jumps over"]
    pieces = []
    for number, piece in enumerate(follow_text(run, "a", follow=True)):
        pieces.append(piece)
        if number < len(texts):
            token_ids = np.array(codec.encode(texts[number]), dtype=np.uint32)
            checkpoints.write_tokens(job_id, attempt, token_ids, (Rewind(9, 1),) if number else ())
        elif number == len(texts):
            finish(run, "a", "the fox jumps over it")
    assert pieces == ["", "the fox the fox", "", f"{TAKEN_BACK}jumps", " over", " it"]


def test_tail_follows_a_running_job_to_its_end(run: Run, tiny_model: Path) -> None:
    pretend_to_run(run)
    record = run.jobs()[0]
    checkpoints = CheckpointStore.of(run)
    attempt = claim(checkpoints, record.job_id, "w1")
    token_ids = np.array(TextCodec(locate_model(str(tiny_model))).encode("jumps over the lazy dog"), dtype=np.uint32)
    pieces = []
    for number, piece in enumerate(follow_text(run, "a", follow=True)):
        pieces.append(piece)
        if number == 0:
            checkpoints.write_tokens(record.job_id, attempt, token_ids)
        elif number == 1:
            finish(run, "a", "jumps over the lazy dog. The end.")
    assert pieces == ["", "jumps over the lazy dog", ". The end."]


def test_tail_tells_of_a_result_that_is_damaged(run: Run, tiny_model: Path) -> None:
    finish(run, "a", "the whole text")
    path = Path(run.store.uri) / "results" / "segments" / f"{run.jobs()[0].job_id}.seg"
    path.write_bytes(path.read_bytes().replace(b"whole", b"whale"))
    told = invoke("tail", run.store.uri, "a")
    assert (told.exit_code, told.stdout) == (1, "\n")
    assert f"results/segments/{path.name}" in told.stderr
