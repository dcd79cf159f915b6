from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.scheduler.runs.scoring import TextScorer, scored_results
from swiftbatch.worker.config import Computation
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.commands.command_parts import invoke, refusal, write_jobs
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import record


def _scored(folder: Path, model: Path, *lines: dict[str, Any], num_top: int = 0) -> list[dict[str, Any]]:
    path = write_jobs(folder / "texts.jsonl", *lines)
    scorer = TextScorer(Computation(model=str(model), dtype="float32", device="cpu"))
    return list(scorer.scored_lines(path, num_top))


def test_results_get_the_bits_that_their_generation_gives(tmp_path: Path, tiny_model: Path) -> None:
    asking = [record("a", 300, {"logprobs": 3}), record("b", 90, {"logprobs": 3, "frequency_penalty": 0.5})]
    run = finished(tmp_path / "asking", tiny_model, *asking)
    expected = [line["response"]["body"]["choices"][0]["logprobs"] for line in run.joined_lines()]
    silent = finished(tmp_path / "silent", tiny_model, record("a", 300), record("b", 90, {"frequency_penalty": 0.5}))
    KeptLogs.of(silent).delete(silent.job_ids()[0])  # its tokens are found by its text
    found = list(scored_results(silent, 3))
    assert [line["response"]["body"]["choices"][0]["logprobs"] for line in found] == expected


def test_texts_get_the_sums_that_transformers_gives(tmp_path: Path, tiny_model: Path) -> None:
    text = {"custom_id": "a", "prompt": "the quick", "text": " brown fox jumps"}
    [line] = _scored(tmp_path, tiny_model, text, num_top=2)
    codec = TextCodec(locate_model(str(tiny_model)))
    before, whole = codec.encode("the quick"), codec.encode("the quick brown fox jumps")
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(torch.tensor([whole])).logits[0]
    rows = torch.log_softmax(logits.double(), -1)[len(before) - 1 : -1]
    expected = rows.gather(1, torch.tensor(whole[len(before) :])[:, None]).sum()
    assert line["num_tokens"] == len(whole) - len(before)
    assert line["logprob"] == pytest.approx(float(expected), abs=1e-3)
    assert line["is_greedy"] == bool((rows.argmax(-1) == torch.tensor(whole[len(before) :])).all())
    assert len(line["logprobs"]["top_logprobs"][0]) >= 2


def test_a_greedy_output_is_greedy(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 80, {"temperature": 0.0, "repetition_penalty": 1.0}))
    [job] = run.jobs()
    token_ids = KeptLogs.of(run).read(job.job_id).token_ids.tolist()
    prompt = TextCodec(locate_model(str(tiny_model))).encode(str(job.job.prompt))
    ids = {"custom_id": "ids", "prompt": prompt, "text": token_ids}
    other = {"custom_id": "other", "prompt": prompt, "text": [*token_ids[:-1], (token_ids[-1] + 1) % 50]}
    assert [line["is_greedy"] for line in _scored(tmp_path, tiny_model, ids, other)] == [True, False]


def test_texts_behind_nothing_have_all_their_tokens(tmp_path: Path, tiny_model: Path) -> None:
    [line] = _scored(tmp_path, tiny_model, {"custom_id": "a", "text": "the quick brown"})
    codec = TextCodec(locate_model(str(tiny_model)))
    assert line["num_tokens"] == len(codec.encode("the quick brown", add_special_tokens=False))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"custom_id": "a", "prompt": "the"}, "field 'text': found nothing"),
        ({"custom_id": "a", "txt": "b"}, "(did you mean text?), expected one of: custom_id, prompt, text, messages"),
        ({"custom_id": "a", "messages": [{"role": "user", "content": "b"}]}, "expected an assistant's text last"),
        ({"custom_id": "a", "text": "x\ud800"}, "expected a text in UTF-8, or token ids"),
        ({"custom_id": "a", "text": [-1]}, "expected a text in UTF-8, or token ids"),
        ({"custom_id": "a", "text": []}, "expected a text in UTF-8, or token ids"),
        ({"custom_id": "a", "prompt": "the", "text": [10**6]}, "token"),
        ({"custom_id": "a", "text": "the " * 5000}, "expected at most the model's 4096"),
    ],
)
def test_a_bad_line_gets_an_error_and_the_others_scores(
    tmp_path: Path, tiny_model: Path, line: dict[str, Any], problem: str
) -> None:
    bad, good = _scored(tmp_path, tiny_model, line, {"custom_id": "good", "text": "the quick"})
    assert problem in bad["error"]
    assert good["error"] is None


def test_white_space_between_prompt_and_text_belongs_to_the_text(tmp_path: Path, tiny_model: Path) -> None:
    lines = [
        {"custom_id": "a", "prompt": "the ", "text": "quick"},
        {"custom_id": "b", "prompt": "the", "text": " quick"},
    ]
    one, other = _scored(tmp_path, tiny_model, *lines)
    assert (one["num_tokens"], one["logprob"]) == (other["num_tokens"], other["logprob"])


REQUESTS = [  # contexts and their continuations, as an evaluation of loglikelihood has them
    ("the quick brown", " fox"),
    ("the quick brown", " dog over the fox"),
    ("the quick brown fox ", "jumps"),  # the blank belongs to the continuation
    ("the lazy\n", "\nfox, na\u00efve"),
    ("", "the quick"),
]


def _likelihoods(model: Path) -> list[tuple[float, bool]]:
    """Return each continuation's sum and whether it is greedy, by transformers."""
    codec, found = TextCodec(locate_model(str(model))), []
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for context, continuation in REQUESTS:
        num_context = len(codec.encode(context.rstrip()))
        whole = torch.tensor(codec.encode(context + continuation))
        with torch.inference_mode():
            rows = torch.log_softmax(reference(whole[None]).logits[0].double(), -1)[num_context - 1 : -1]
        own = whole[num_context:]
        found.append((float(rows.gather(1, own[:, None]).sum()), bool((rows.argmax(-1) == own).all())))
    return found


def test_requests_of_an_evaluation_get_the_sums_that_transformers_gives(tmp_path: Path, tiny_model: Path) -> None:
    lines = [{"custom_id": str(n), "prompt": each[0], "text": each[1]} for n, each in enumerate(REQUESTS)]
    found = _scored(tmp_path, tiny_model, *lines)
    for line, (total, is_greedy) in zip(found, _likelihoods(tiny_model), strict=True):
        assert line["logprob"] == pytest.approx(total, abs=1e-3)
        assert line["is_greedy"] == is_greedy


def test_a_completion_with_an_echo_gives_the_same_sums_to_the_bit(tmp_path: Path, tiny_model: Path) -> None:
    """An evaluation over HTTP sends context and continuation as one prompt, and drops the token behind it."""
    codec = TextCodec(locate_model(str(tiny_model)))
    asked = {"logprobs": 1, "echo": True, "temperature": 0.0}
    jobs = [record(str(n), 1, asked, prompt=context + more) for n, (context, more) in enumerate(REQUESTS)]
    echoes = [
        line["response"]["body"]["choices"][0] for line in finished(tmp_path / "run", tiny_model, *jobs).joined_lines()
    ]
    lines = [{"custom_id": str(n), "prompt": each[0], "text": each[1]} for n, each in enumerate(REQUESTS)]
    scored = _scored(tmp_path, tiny_model, *lines, num_top=1)
    for (context, _), choice, line in zip(REQUESTS, echoes, scored, strict=True):
        logprobs, start = choice["logprobs"], len(codec.encode(context.rstrip()))
        assert logprobs["token_logprobs"][start:-1] == line["logprobs"]["token_logprobs"]
        tops = logprobs["top_logprobs"][start:-1]
        own = logprobs["token_logprobs"][start:-1]
        assert line["is_greedy"] == all(value == max(top.values()) for value, top in zip(own, tops, strict=True))


def test_a_file_is_never_written_over_itself(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "texts.jsonl", {"custom_id": "a", "text": "the quick"})
    before = Path(path).read_bytes()
    assert "found the file that is read" in refusal("score", path, "--model", str(tiny_model), "--output", path)
    assert Path(path).read_bytes() == before
    assert "No such file" in refusal(
        "score", path, "--model", str(tiny_model), "--output", str(tmp_path / "no" / "out")
    )


def test_the_command_writes_a_line_each(tmp_path: Path, tiny_model: Path) -> None:
    path, output = write_jobs(tmp_path / "texts.jsonl", {"custom_id": "a", "text": "the quick"}, {}), tmp_path / "out"
    done = invoke("score", path, "--model", str(tiny_model), "--output", str(output))
    assert (done.exit_code, "1 lines have an error" in done.output) == (1, True)
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["a", None]
    run = finished(tmp_path / "run", tiny_model, record("b", 20))
    assert json.loads(invoke("score", run.store.uri).stdout)["custom_id"] == "b"
