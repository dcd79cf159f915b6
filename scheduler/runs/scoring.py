"""Scores texts that exist: the results of a run, or lines of prompts and texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from pydantic import PlainValidator, ValidationError

from swiftbatch.jobs.errors import LineError, UserError
from swiftbatch.jobs.input.job_files import open_input, shown_input
from swiftbatch.jobs.input.line_parsing import parse_object
from swiftbatch.jobs.input.request_fields import LineId
from swiftbatch.jobs.job import JobRecord, Messages, unpacked
from swiftbatch.jobs.json_records import FieldError, Strict, is_utf8, reasons, shown
from swiftbatch.jobs.logprobs import completion_logprobs, shown_logprobs
from swiftbatch.jobs.run.output import ended_lines, joined
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.verification import Verifier
from swiftbatch.worker.config import Computation
from swiftbatch.worker.engine.stopping import echo_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.replay.scoring import Scorer
from swiftbatch.worker.text.tokenizer import Chat, TextCodec

Line = dict[str, Any]


def _text_or_ids(value: object) -> str | tuple[int, ...]:
    """Raise FieldError."""
    if isinstance(value, str) and is_utf8(value):
        return value
    ids = value if isinstance(value, list) and value else [None]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise FieldError("", f"found {shown(value)}, expected a text in UTF-8, or token ids")
    return tuple(ids)


TextOrIds = Annotated[str | tuple[int, ...], PlainValidator(_text_or_ids)]


class TextLine(Strict):
    """A prompt and the text behind it, each as text or token ids; or a chat whose last message is the text."""

    custom_id: LineId
    prompt: TextOrIds = ""
    text: TextOrIds = ""
    messages: Messages | None = None


def scored_results(run: Run, num_top: int) -> Iterator[Line]:
    """Yield the output lines of a run with log-probabilities. Raises as `load_model` does.

    A result whose tokens this model does not draw has no log-probabilities.
    """
    verifier = Verifier(run)
    scorer = Scorer(verifier.target)

    def scored(record: JobRecord, line: Line) -> Line:
        [choice] = line["response"]["body"]["choices"]
        token_ids = verifier.tokens(record, choice)
        if token_ids is not None:
            ids, codec, own = unpacked(record.prompt_token_ids), verifier.codec, token_ids.astype(np.uint32)
            lora, echo = record.job.lora_name, echo_of(record.job, ids, codec)
            found = scorer.logprobs(ids, token_ids.tolist(), num_top, lora)
            prompt = scorer.scores(ids[:1], ids[1:], num_top, lora).of_prompt() if record.job.sampling.echo else None
            choice["logprobs"] = shown_logprobs(record.job, own, found, codec, prompt, echo)
        return line

    lines = ((record, line) for record, line in run.output_lines() if line is not None)
    entries = ((record, scored(record, line) if line["error"] is None else line) for record, line in lines)
    return map(joined, ended_lines(entries))


class TextScorer:
    """Scores lines of prompts and texts on one model."""

    def __init__(self, computation: Computation) -> None:
        """Raise ModelError."""
        files = locate_model(computation.model)
        self._codec = TextCodec(files)
        self._target = TargetModel.load(
            files,
            computation.dtype,
            computation.device,
            kernels=computation.cuda_kernels,
            kv_dtype=computation.kv_dtype,
            never_sampled_ids=self._codec.textless_ids,
        )
        self._scorer, self._max_positions = Scorer(self._target), files.max_positions

    def scored_lines(self, path: str, num_top: int) -> Iterator[Line]:
        """Yield a line for each line of a file: its log-probabilities, or an error. Raises InputFileError."""
        with open_input(path, shown_input(path)) as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield self._scored(text, number, num_top)

    def _scored(self, text: bytes, number: int, num_top: int) -> Line:
        try:
            line = _text_line(text)
        except (LineError, UnicodeDecodeError) as error:
            return {"line_number": number, "custom_id": None, "error": str(error)}
        try:
            return {"custom_id": line.custom_id, **self._score(line, num_top), "error": None}
        except (ValueError, UserError) as error:
            return {"line_number": number, "custom_id": line.custom_id, "error": str(error)}

    def _score(self, line: TextLine, num_top: int) -> Line:
        prompt_ids, token_ids = self._tokens(line)
        if len(prompt_ids) + len(token_ids) > self._max_positions:
            raise ValueError(
                f"found {len(prompt_ids) + len(token_ids)} tokens, expected at most the model's {self._max_positions}"
            )
        found = self._scorer.logprobs(prompt_ids, token_ids, max(1, num_top))  # one tells whether a token is greedy
        return {
            "num_tokens": len(token_ids),
            "logprob": float(found.logprobs.sum(dtype=np.float64)),
            "is_greedy": bool((found.top_ids[:, 0] == np.asarray(token_ids)).all()),
            "logprobs": completion_logprobs(token_ids, found.top(num_top), self._codec),
        }

    def _tokens(self, line: TextLine) -> tuple[list[int], list[int]]:
        """Return the tokens of a line's prompt and text. Raises ValueError."""
        if line.messages is not None:
            *earlier, last = line.messages
            if line.text or line.prompt or last.role != "assistant" or not earlier or not last.content:
                raise ValueError("field 'messages': expected an assistant's text last, and no 'prompt' or 'text'")
            prompt_ids = self._codec.encode_one(Chat(tuple(earlier), None)).token_ids
            return prompt_ids, self._codec.encode(last.content, add_special_tokens=False)
        if not line.text:
            raise ValueError("field 'text': found nothing, expected a text or token ids")
        prompt, text = line.prompt, line.text
        if isinstance(prompt, str) and isinstance(text, str):
            text, prompt = prompt[len(prompt.rstrip()) :] + text, prompt.rstrip()  # as lm-eval splits them
            text_ids = self._codec.encode(prompt + text)[len(self._codec.encode(prompt)) :]
            if not text_ids:
                raise ValueError("field 'text': it has no token of its own; expected a prompt that ends with a word")
            return self._begin(prompt), text_ids
        text_ids = self._codec.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)
        if unknown := [each for each in text_ids if each >= self._target.vocab_size]:
            raise ValueError(
                f"field 'text': found token {unknown[0]}, the model's are 0 to {self._target.vocab_size - 1}"
            )
        return self._begin(prompt), text_ids

    def _begin(self, prompt: str | tuple[int, ...]) -> list[int]:
        """Return a prompt's tokens; an empty one is the token that begins or ends texts."""
        if not isinstance(prompt, str):
            return self._codec.encode_one(prompt).token_ids
        return self._codec.encode(prompt) or [min(self._target.eos_token_ids)]


def _text_line(text: bytes) -> TextLine:
    try:
        return TextLine.model_validate(parse_object(text.decode()))
    except ValidationError as error:
        raise LineError(reasons(error, TextLine)) from None
