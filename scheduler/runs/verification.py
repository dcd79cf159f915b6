"""Verifies a run: draws a sample of its tokens again on this machine, and compares them bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.file_owner import DamagedFileError
from swiftbatch.jobs.job import JobRecord, unpacked
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.run.job_index import JobIndex
from swiftbatch.jobs.run.output_line import CALLED, message_of, shown_text, tokens_sha256
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS
from swiftbatch.scheduler.runs.logprobs_comparison import largest_difference, prompt_difference
from swiftbatch.scheduler.runs.run_manifest import computation_of, versions
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.drafters.catalogue import PLAIN_ENGINE
from swiftbatch.worker.engine.job_sequence import sequence_of
from swiftbatch.worker.engine.stopping import StopRule, answer_of, echo_of, text_of
from swiftbatch.worker.forward.hardware import cpu_capability
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.replay.replay import Replay
from swiftbatch.worker.replay.scoring import Scorer
from swiftbatch.worker.sampling.sequence import Sequence as TokenSequence
from swiftbatch.worker.sampling.token_masks import ConstraintError
from swiftbatch.worker.session.run_model import loaded_target, located_model
from swiftbatch.worker.text.tokenizer import TextCodec

SPAN = 256  # tokens
FEWEST_SPANS = 20
# another order of sums can move scores and log-probabilities by less; measured in bfloat16: 0.012 and 0.085
TIE, LOGPROBS_TIE = 0.05, 0.25

Line = dict[str, Any]
Verdict = Literal["exact", "exact up to ties", "differs"]


class Mismatch(Frozen):
    """Something in a result that this machine does not draw.

    `what` is `job` (another prompt or id), `line` (names or counts of another job), `token`, `end` (one output goes
    on), `output` (the position is the first differing character), `text` (not that of the tokens), `log` (tokens of
    another result), `logprobs` or `prompt` (log-probabilities; the margin is the largest difference).
    """

    custom_id: str
    choice: int
    what: Literal["job", "line", "token", "end", "output", "text", "log", "logprobs", "prompt"]
    position: int | None = None
    recorded: int | None = None
    drawn: int | None = None
    margin: float | None = None


class VerificationReport(Frozen):
    """Result of a verification; `sample_seed` chooses the same spans again."""

    run_id: str
    system_fingerprint: str
    model: str
    numerics: str
    versions: dict[str, str]
    sample_seed: int
    num_tokens: int
    num_spans: int
    num_jobs: int
    num_tokens_of_run: int
    verdict: Verdict
    findings: tuple[Mismatch, ...]


class ChosenJob(NamedTuple):
    """A job by its row in the run's index, with ascending spans of its output."""

    row: int
    spans: list[range]


def chosen_jobs(num_tokens: NDArray[np.int64], fraction: float, seed: int) -> list[ChosenJob]:
    """Choose spans at random among the outputs of all rows, `[num_rows]`; a row without result has 0 tokens."""
    num_spans = -(-num_tokens // SPAN)
    ends = np.cumsum(num_spans)
    total = int(ends[-1]) if len(ends) else 0
    count = min(total, max(FEWEST_SPANS, int(np.ceil(fraction * total))))
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False, shuffle=False))
    rows = np.searchsorted(ends, chosen, side="right")
    starts = SPAN * (chosen - (ends - num_spans)[rows])
    pairs = zip(rows.tolist(), starts.tolist(), strict=True)
    return [
        ChosenJob(row, [range(start, min(start + SPAN, int(num_tokens[row]))) for _, start in spans])
        for row, spans in groupby(pairs, key=lambda pair: pair[0])
    ]


def load_model(run: Run, model: str | None = None) -> tuple[TargetModel, TextCodec]:
    """Load the run's model, or `model` in its place, to compute as the run does. Raises ModelError, OtherModelError."""
    import torch

    manifest = run.manifest
    computation = replace(
        computation_of(manifest, Settings()), engine=PLAIN_ENGINE, engine_options=(), draft_model=None
    )
    torch.set_num_threads(manifest.num_threads)
    files = located_model(manifest.model, run) if model is None else locate_model(model)
    text_settings = (manifest.thinking_markers, manifest.clock, manifest.lenient_schemas, manifest.plain_content)
    codec = TextCodec(files, *text_settings)
    return loaded_target(EngineConfig(**asdict(computation)), files, run, codec.textless_ids), codec


class Verifier:
    """Draws a run's results again, with its model or another one."""

    def __init__(self, run: Run, model: str | None = None) -> None:
        """Raise errors as `load_model` does."""
        self.target, self.codec = load_model(run, model)
        self.model, self.numerics = self.target.files.name, self.target.numerics
        self._replay = Replay(self.target, self.codec, run.manifest.logprobs_mode)
        self._scorer, self._logs = Scorer(self.target), KeptLogs.of(run)
        self._is_of_run, self._fingerprint = model is None, run.manifest.model_fingerprint

    def verify(self, record: JobRecord, line: Line, spans: Sequence[range]) -> tuple[int, list[Mismatch]]:
        """Draw spans of a result again; return how many tokens were drawn, and the findings.

        Draws the whole output if its tokens are unknown, or after a rewound loop or a closed thought.
        """
        body = line["response"]["body"]
        [choice] = body["choices"]
        found = self._of_job(record, line, body, choice)
        try:
            token_ids = self.known_tokens(record, choice)
            if token_ids is None or _was_changed(record, body["metrics"]):
                num_drawn, more = self._verify_whole(record, choice)
            else:
                num_drawn, more = self._verify_spans(record, body, token_ids, spans)
            more += self._other_prompt_logprobs(record, body, choice)
        except (ConstraintError, ValueError):  # tokens that this model cannot draw at all
            return 0, [*found, _mismatch(record, "output")]
        return num_drawn, found + more

    def _of_job(self, record: JobRecord, line: Line, body: Line, choice: Line) -> list[Mismatch]:
        """Return what does not belong together in a job and its line."""
        job, prompt_ids, found = record.job, unpacked(record.prompt_token_ids), list[Mismatch]()
        if self._is_of_run:
            own = self.codec.prompt_of(job).token_ids
            own = own[-len(prompt_ids) :] if job.sampling.truncate_prompt_tokens is not None else own
            if own != prompt_ids or job.job_id(self._fingerprint) != record.job_id:
                found.append(_mismatch(record, "job"))
        named = (line["custom_id"], choice.get("index"), body["usage"]["prompt_tokens"])
        shown_ids = (body | choice).get("prompt_token_ids")
        is_its = named == (job.custom_id, job.choice_index, len(prompt_ids)) and shown_ids in (None, prompt_ids)
        return found if is_its else [*found, _mismatch(record, "line")]

    def _verify_spans(
        self, record: JobRecord, body: Line, token_ids: NDArray[np.int64], spans: Sequence[range]
    ) -> tuple[int, list[Mismatch]]:
        [choice], begun = body["choices"], list(record.job.begun_ids or ())  # the latter are given, not drawn
        is_its = len(token_ids) == body["usage"]["completion_tokens"] and token_ids[: len(begun)].tolist() == begun
        if not is_its or tokens_sha256(token_ids.astype(np.uint32)) != choice["token_ids_sha256"]:
            return 0, [_mismatch(record, "log")]
        sequence, thinking = sequence_of(record, self.codec, self.target.vocab_size, self.target.device)
        sequence = sequence.with_output(token_ids[: record.job.sampling.max_tokens].tolist())
        sequence.eos_token_ids = self.target.eos_token_ids
        ends = StopRule(sequence, self.codec.output_text, thinking).now()
        found = [] if ends == _end_of(choice) else [_mismatch(record, "end", position=len(token_ids))]
        sequence.finish_reason = _end_of(choice)
        found += [] if self._shows(record, sequence, thinking, choice) else [_mismatch(record, "text")]
        drawn = [range(max(span.start, len(begun)), span.stop) for span in spans if span.stop > len(begun)]
        spans_drawn = self._replay.drawn(record, token_ids, drawn, record.job.sampling.logprobs)
        for draw in (draw for span in spans_drawn for draw in span.differing):
            what: Literal["token", "end"] = "end" if None in (draw.recorded, draw.drawn) else "token"
            found = [each for each in found if what != "end" or each.what != "end"]  # this one says more
            found.append(_mismatch(record, what, **draw._asdict()))
        others = {each.position for each in found if each.position is not None}
        parts = [(span.start, each.logprobs) for span, each in zip(drawn, spans_drawn, strict=True)]
        return sum(map(len, drawn)), found + self._other_logprobs(record, choice, token_ids, parts, others)

    def _other_logprobs(
        self,
        record: JobRecord,
        choice: Line,
        token_ids: NDArray[np.int64],
        drawn: Iterable[tuple[int, TokenLogprobs | None]],
        others: Collection[int] = (),
    ) -> list[Mismatch]:
        """Compare log-probabilities; those that `swiftbatch score` added to a result are computed as it does."""
        parts, prompt_ids = (
            [(first, each) for first, each in drawn if each is not None],
            unpacked(record.prompt_token_ids),
        )
        if record.job.sampling.logprobs is None:
            if choice.get("logprobs") is None:
                return []
            parts = [(0, self._scorer.logprobs(prompt_ids, token_ids.tolist(), MAX_TOP_LOGPROBS, record.job.lora_name))]
        prompt = (len(prompt_ids), echo_of(record.job, prompt_ids, self.codec)) if record.job.sampling.echo else None
        found = largest_difference(
            record.job, choice.get("logprobs"), token_ids.astype(np.uint32), parts, others, self.codec, prompt
        )
        return [] if found is None else [_mismatch(record, "logprobs", position=found.position, margin=found.size)]

    def _other_prompt_logprobs(self, record: JobRecord, body: Line, choice: Line) -> list[Mismatch]:
        """Compare the log-probabilities of the prompt, which `swiftbatch score` also adds to an echo."""
        sampling, shown, prompt_ids = record.job.sampling, body | choice, unpacked(record.prompt_token_ids)
        num_top = sampling.num_top_of_prompt
        if sampling.echo and sampling.logprobs is None and shown.get("logprobs") is not None:
            num_top = MAX_TOP_LOGPROBS
        if num_top is None and shown.get("prompt_logprobs") is None:
            return []
        prompt = self._scorer.scores(prompt_ids[:1], prompt_ids[1:], num_top or 0, record.job.lora_name).of_prompt()
        echo = echo_of(record.job, prompt_ids, self.codec)
        found = prompt_difference(record.job, shown, prompt, echo, self.codec)
        return [] if found is None else [_mismatch(record, "prompt", position=found.position, margin=found.size)]

    def tokens(self, record: JobRecord, choice: Line) -> NDArray[np.int64] | None:
        """Return a result's tokens, drawn again if they are not at hand, or None if this model draws others."""
        known = self.known_tokens(record, choice)
        if known is None:
            sequence, _ = self._replay.again(record, _output_text(record, choice, self.codec))
            known = sequence.output_ids
        return known if tokens_sha256(known.astype(np.uint32)) == choice["token_ids_sha256"] else None

    def _verify_whole(self, record: JobRecord, choice: Line) -> tuple[int, list[Mismatch]]:
        recorded = _output_text(record, choice, self.codec)
        sequence, thinking = self._replay.again(record, recorded, record.job.sampling.logprobs)
        is_same = tokens_sha256(sequence.output_ids.astype(np.uint32)) == choice["token_ids_sha256"]
        if is_same and sequence.finish_reason == _end_of(choice):
            found = [] if self._shows(record, sequence, thinking, choice) else [_mismatch(record, "text")]
            drawn_logprobs, num_begun = sequence.kept_logprobs, len(record.job.begun_ids or ())
            found += self._other_logprobs(record, choice, sequence.output_ids, [(num_begun, drawn_logprobs)])
            return sequence.num_generated_tokens, found
        drawn = text_of(sequence, self.codec.output_text, thinking)
        differs = (place for place, (one, other) in enumerate(zip(recorded, drawn, strict=False)) if one != other)
        place = next(differs, min(len(recorded), len(drawn)))
        return sequence.num_generated_tokens, [_mismatch(record, "output", position=place)]

    def _shows(self, record: JobRecord, sequence: TokenSequence, thinking: Thinking | None, choice: Line) -> bool:
        """Return whether a choice shows the text of the output."""
        answer = answer_of(sequence, record.job, self.codec, thinking)
        if "message" not in choice:
            return bool(choice["text"] == answer.text)
        return bool(choice["message"] == message_of(*answer))

    def known_tokens(self, record: JobRecord, choice: Line) -> NDArray[np.int64] | None:
        return known_tokens(self._logs, self.codec, self.target.eos_token_ids, record, choice)


def known_tokens(
    logs: KeptLogs, codec: TextCodec, eos_token_ids: Collection[int], record: JobRecord, choice: Line
) -> NDArray[np.int64] | None:
    """Return a result's tokens: its own, those of its token log, or of its text if the tokenizer splits it so."""
    if (said := choice.get("token_ids")) is not None:
        return np.asarray(said, np.int64)
    try:
        return logs.read(record.job_id).token_ids.astype(np.int64)
    except DamagedFileError:
        text = codec.encode(_output_text(record, choice, codec), add_special_tokens=False)
    found = (np.asarray([*text, *end], np.int64) for end in [(), *((token_id,) for token_id in eos_token_ids)])
    is_its = (ids for ids in found if tokens_sha256(ids.astype(np.uint32)) == choice["token_ids_sha256"])
    return next(is_its, None)


def _output_text(record: JobRecord, choice: Line, codec: TextCodec) -> str:
    """Return the text of a choice behind its prompt's, if that stands before it."""
    return shown_text(choice).removeprefix(echo_of(record.job, unpacked(record.prompt_token_ids), codec))


def verify_run(
    run: Run, fraction: float, seed: int, custom_ids: Sequence[str] = (), model: str | None = None
) -> VerificationReport:
    """Verify a sample of a run's results, or all of the named jobs. Raises RunError, ModelError, StoreError."""
    index, num_tokens = _results(run, custom_ids)
    chosen = chosen_jobs(num_tokens, 1.0 if custom_ids else fraction, seed)
    verifier = Verifier(run, model)
    num_drawn, findings, may_tie = 0, list[Mismatch](), not _computes_alike(run)
    for job, record, line in _read(run, index, chosen):
        may_tie |= _had_other_bits(line["response"]["body"]["metrics"], verifier.numerics)
        number, found = verifier.verify(record, line, job.spans)
        num_drawn += number
        findings += found
    are_ties = may_tie and all(map(_is_tie, findings))
    return VerificationReport(
        run_id=run.manifest.run_id,
        system_fingerprint=run.manifest.fingerprint,
        model=verifier.model,
        numerics=verifier.numerics,
        versions=versions(),
        sample_seed=seed,
        num_tokens=num_drawn,
        num_spans=sum(len(job.spans) for job in chosen),
        num_jobs=len(chosen),
        num_tokens_of_run=int(num_tokens.sum()),
        verdict="exact" if not findings else "exact up to ties" if are_ties else "differs",
        findings=tuple(findings),
    )


def _results(run: Run, custom_ids: Sequence[str]) -> tuple[JobIndex, NDArray[np.int64]]:
    """Return jobs, all or the named ones, and the tokens of their results, 0 for a job without. Raises RunError."""
    index = run.job_index()
    if custom_ids:
        found = index.some(index.rows_of("custom_id", custom_ids))
        if missing := sorted({*custom_ids}.difference(found.custom_ids())):
            raise RunError(f"no job {missing[0]!r} in the run at {run.store.shown_uri}; its jobs are in jobs.parquet")
        index = found
    num_tokens = np.zeros(len(index), np.int64)
    rows, _ = run.ended_jobs(index)
    pairs = np.asarray(rows, np.int64).reshape(-1, 2)
    num_tokens[pairs[:, 0]] = pairs[:, 1]
    if not num_tokens.any():
        raise RunError(f"the run at {run.store.shown_uri} has no results of these jobs yet: expected at least one")
    return index, num_tokens


def _read(run: Run, index: JobIndex, chosen: Sequence[ChosenJob]) -> Iterator[tuple[ChosenJob, JobRecord, Line]]:
    for job in chosen:
        one = index.some(np.asarray([job.row]))
        [record], [line] = list(run.records_at(one.places)), list(run.lines_of(one))
        if line is None:
            raise RunError(f"the result of job {record.custom_id!r} is damaged: `swiftbatch resume` runs it again")
        yield job, record, line


def _computes_alike(run: Run) -> bool:
    """Return whether this machine is of the kind that the run was made on, as far as its manifest says."""
    manifest = run.manifest
    same = manifest.cpu_capability == cpu_capability() and manifest.versions == versions()
    return same and manifest.device == "cpu"


def _is_tie(finding: Mismatch) -> bool:
    return finding.margin is not None and finding.margin < (TIE if finding.what == "token" else LOGPROBS_TIE)


def _had_other_bits(metrics: Line, numerics: str) -> bool:
    """Return whether a result says that it was computed with other numerics than this machine's."""
    said = metrics.get("attempts")
    attempts = [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []
    return metrics.get("exactness") == "exact up to ties" or any(
        (each.get("numerics") or numerics) != numerics for each in attempts
    )


def _was_changed(record: JobRecord, metrics: Line) -> bool:
    """Return whether a loop was rewound, or a marker may have closed a thought without being drawn."""
    return closes_thoughts(record) or metrics.get("num_rewinds", 0) != 0


def closes_thoughts(record: JobRecord) -> bool:
    detection = record.job.sampling.repetition_detection
    return record.job.sampling.thinking_end == "close" or (detection is not None and detection.action == "close")


def _mismatch(record: JobRecord, what: Any, **fields: Any) -> Mismatch:
    return Mismatch(custom_id=record.custom_id, choice=record.job.choice_index, what=what, **fields)


def _end_of(choice: Line) -> str:
    return "stop" if choice["finish_reason"] == CALLED else str(choice["finish_reason"])
