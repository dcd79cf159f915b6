"""Draws the recorded tokens of jobs again, many positions per forward, since they are known."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.job_sequence import sequence_of
from swiftbatch.worker.engine.stopping import closed, may_rewind, rewound
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import rows_of_trees
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import KeptLogprobs, Sequence
from swiftbatch.worker.text.tokenizer import TextCodec

MOST_DIFFERING = 20  # of a span; with another model nearly all draws differ
MOST_ASTRAY = 64  # tokens of another text before a replay gives up


class DifferingDraw(NamedTuple):
    """A recorded token and the token that the model draws after the same tokens; None stands for the text's end.

    `margin` is the drawn token's score minus the recorded one's, in units of the noise. Rounding moves a score by about
    a thousandth. It is None at an end, and if filters excluded the recorded token.
    """

    position: int  # from the first generated token
    recorded: int | None
    drawn: int | None
    margin: float | None = None


class DrawnSpan(NamedTuple):
    """The draws of a span that differ from the record, and the log-probabilities of all draws, if they were asked for.

    The log-probabilities end early if the search did.
    """

    differing: list[DifferingDraw]
    logprobs: TokenLogprobs | None


class KnownTokens(Drafter):
    """Proposes the recorded tokens of the one sequence as a chain."""

    def __init__(self) -> None:
        self.token_ids = np.zeros(0, np.int64)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> DraftTree:
        start = request.sequence.num_generated_tokens
        known = self.token_ids[start : start + min(request.max_nodes, request.max_depth)]
        return DraftTree.chain(known.tolist())


class Replay:
    """Draws the tokens of jobs again on one model."""

    def __init__(self, target: TargetModel, codec: TextCodec, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._target, self._codec = target, codec
        self._known = KnownTokens()
        self._engine = Engine(target, self._known, codec.output_text, logprobs_mode=logprobs_mode)

    def again(self, record: JobRecord, text: str, num_top: int | None = None) -> tuple[Sequence, Thinking | None]:
        """Draw a job's whole output again, rewinding loops and closing thoughts as before.

        With `num_top`, it gets log-probabilities, each with so many of the likeliest tokens.

        The recorded `text` is a fast guess of the tokens. If that text is complete, another output ends early.
        """
        sequence, thinking = self._sequence_of(record, num_top)
        most_astray = MOST_ASTRAY if thinking is None and _shows_all(record) else math.inf
        self._engine.start(sequence, self._new_cache(sequence), thinking=thinking)
        self._known.token_ids = self._guess(sequence, text)
        num_astray = 0
        while num_astray < most_astray:
            if sequence.finish_reason is None:
                num_astray = self._step_along(sequence, text, num_astray)
            elif (other := _goes_on(sequence, thinking)) is None:
                break
            else:
                sequence = other
                self._engine.replace(sequence)
        self._engine.stop(sequence)
        return sequence, thinking

    def _step_along(self, sequence: Sequence, text: str, num_astray: int) -> int:
        """Take a step, guess the rest of the text anew if the draws were others, and return how many lead elsewhere."""
        num_before = sequence.num_generated_tokens
        self._engine.step()
        drawn = sequence.output_ids
        if np.array_equal(self._known.token_ids[num_before : len(drawn)], drawn[num_before:]):
            return num_astray
        if text.startswith(self._settled(sequence)):
            self._known.token_ids = self._guess(sequence, text)
            return 0
        return num_astray + len(drawn) - num_before

    def _guess(self, sequence: Sequence, text: str) -> np.ndarray:
        """Return the output so far, and the rest of the text as the tokenizer splits it."""
        rest = self._codec.encode(text[len(self._settled(sequence)) :], add_special_tokens=False)
        return np.concatenate([sequence.output_ids, np.asarray(rest, np.int64)])

    def _settled(self, sequence: Sequence) -> str:
        return self._codec.output_text.settled(sequence.output_ids.tolist())

    def drawn(
        self, record: JobRecord, token_ids: np.ndarray, spans: Many[range], num_top: int | None = None
    ) -> list[DrawnSpan]:
        """Draw the tokens of ascending spans of a job's output again, with log-probabilities if `num_top` is given.

        `token_ids [num_tokens]` are the whole output, without a rewound loop or a closed thought. A span up to the last
        token also checks the output's end. The search in a span ends after `MOST_DIFFERING` differing draws.
        """
        self._known.token_ids = token_ids
        sequence, thinking = self._sequence_of(record, None)
        cache = self._new_cache(sequence)
        self._engine.start(sequence, cache, thinking=thinking)
        found: list[DrawnSpan] = []
        for span in spans:
            if num_top is not None:
                sequence.logprobs = KeptLogprobs(len(span) + 2 * (1 + MAX_TREE_NODES), num_top)
            sequence = self._moved_to(sequence, token_ids[: span.start], span)
            differing, sequence = self._differing(sequence, cache, token_ids, span)
            kept = sequence.kept_logprobs
            found.append(DrawnSpan(differing, None if kept is None else kept.part(0, len(span))))
        self._engine.stop(sequence)
        return found

    def _differing(
        self, sequence: Sequence, cache: FullKVCache, token_ids: np.ndarray, span: range
    ) -> tuple[list[DifferingDraw], Sequence]:
        """Return a span's differing draws, and the sequence behind them."""
        found: list[DifferingDraw] = []
        position = span.start
        while position < span.stop and len(found) < MOST_DIFFERING:
            if sequence.finish_reason is not None:  # the output goes on behind its end
                return [*found, DifferingDraw(position, int(token_ids[position]), None)], sequence
            self._engine.step()
            drawn = sequence.output_ids[position : span.stop]
            differs = np.flatnonzero(drawn != token_ids[position : position + len(drawn)])
            if not len(differs):
                position += len(drawn)
                continue
            place, kept = position + int(differs[0]), sequence.logprobs
            sequence, other = self._moved_to(sequence, token_ids[:place], span), int(drawn[differs[0]])
            margin = self._margin(sequence, cache, int(token_ids[place]), other)
            found.append(DifferingDraw(place, int(token_ids[place]), other, margin))
            position = place + 1
            sequence.logprobs = kept  # with those of the differing draw
            sequence = self._moved_to(sequence, token_ids[:position], span)
        if position == len(token_ids) and not _ends_at(sequence, position):
            found.append(DifferingDraw(position, None, self._next(sequence, position)))
        return found, sequence

    def _margin(self, sequence: Sequence, cache: FullKVCache, recorded: int, drawn: int) -> float | None:
        """Return by how much the drawn token's score exceeds the recorded one's, if no constraint decided."""
        if sequence.rules or cache.length != len(sequence) - 1:
            return None
        rows = rows_of_trees([cache], [sequence.last_token_id], [DraftTree()])
        logits = self._target.verify(rows)[0].logits[0]
        sampler = TokenSampler(sequence, self._target.vocab_size, self._target.device)
        scores = sampler.scores(logits)
        margin = float(scores[drawn] - scores[recorded])
        return margin if math.isfinite(margin) else None

    def _next(self, sequence: Sequence, position: int) -> int:
        """Return the next token after an output's recorded tokens."""
        while sequence.num_generated_tokens <= position:
            self._engine.step()
        return int(sequence.output_ids[position])

    def _moved_to(self, sequence: Sequence, token_ids: np.ndarray, span: range) -> Sequence:
        """Give the sequence another output, which keeps the log-probabilities of the span's first tokens."""
        again = sequence.with_output(token_ids.tolist())
        if sequence.logprobs is not None:
            again.logprobs = sequence.logprobs.first(len(token_ids) - span.start)
        self._engine.replace(again)
        return again

    def _sequence_of(self, record: JobRecord, num_top: int | None) -> tuple[Sequence, Thinking | None]:
        sequence, thinking = sequence_of(record, self._codec, self._target.vocab_size, self._target.device)
        sequence.logprobs = None if num_top is None else KeptLogprobs(record.job.sampling.max_tokens, num_top)
        return sequence, thinking

    def _new_cache(self, sequence: Sequence) -> FullKVCache:
        return self._engine.new_cache(sequence.max_length, sequence.lora)


def _shows_all(record: JobRecord) -> bool:
    """Return whether a result shows all drawn text; calls of tools are rewritten, and rewound loops are gone."""
    template, detection = record.job.template, record.job.sampling.repetition_detection
    return not (template and template.tools) and (detection is None or detection.action != "rewind")


def _ends_at(sequence: Sequence, num_tokens: int) -> bool:
    return sequence.finish_reason is not None and sequence.num_generated_tokens == num_tokens


def _goes_on(sequence: Sequence, thinking: Thinking | None) -> Sequence | None:
    """Return an ended sequence rewound or with its thought closed, or None if it ends for good."""
    return rewound(sequence) if may_rewind(sequence) else closed(sequence, thinking)
