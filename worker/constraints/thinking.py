"""Thinking: a model's markers, the thought within a text, and its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from swiftbatch.jobs.run.output_line import Reasoning
from swiftbatch.worker.sampling.token_masks import Constraint, ConstraintError, mask_of

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Rule, Sequence

Opening = Literal["anywhere", "first", "never"]
"""Places where an output may open a thought."""

MISSED = -1  # number of matched tokens once the start can no longer open a thought


@dataclass(frozen=True)
class Markers:
    """Tokens that open and close a thought, and their texts without outer space."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    texts: tuple[str, str] = ("", "")

    def last_in(self, text: str, num_before: int = 0) -> Literal["start", "end"] | None:
        """Return the last marker in a text that ends after its first `num_before` characters."""
        ends = []
        for marker in self.texts:
            place = text.rfind(marker, max(0, num_before - len(marker) + 1))
            ends.append((place + len(marker), len(marker)) if place >= 0 else (0, 0))
        start, end = ends  # if both end together, one contains the other
        return None if start == end else "start" if start > end else "end"


@dataclass(frozen=True)
class Thinking:
    """Thinking of a job's output, which has at most one thought."""

    markers: Markers
    is_open: bool
    opening: Opening = "anywhere"

    def in_output(self, output_ids: Iterable[int]) -> Thought:
        thought = Thought(self)
        for token_id in output_ids:
            thought.push(token_id)
        return thought


class Thought:
    """Thought of an output so far, which depends on its tokens alone."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._token_ids: list[int] = []
        self.opened_at: int | None = 0 if thinking.is_open else None  # number of output tokens before the thought
        self.closed_at: int | None = None  # number of output tokens up to the end of the closing marker

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_matched(self) -> int:
        """Return how many tokens of the next marker match at the output's end."""
        markers, opening = self._thinking.markers, self._thinking.opening
        if self.closed_at is not None:
            return 0
        if self.opened_at is not None:
            return _num_matched(markers.end, self._token_ids, self.opened_at)
        if opening == "anywhere":
            return _num_matched(markers.start, self._token_ids)
        begins = opening == "first" and (*self._token_ids[: len(markers.start)],) == markers.start[: len(self)]
        return len(self) if begins else MISSED

    @property
    def is_open(self) -> bool:
        return self.opened_at is not None and self.closed_at is None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the thought without markers.

        An open thought extends to the end of the output.
        """
        if self.opened_at is None:
            return 0
        if self.closed_at is None:
            return len(self) - self.opened_at
        return self.closed_at - len(self._thinking.markers.end) - self.opened_at

    @property
    def num_before_answer(self) -> int:
        if self.opened_at is None:
            return 0
        return len(self) if self.closed_at is None else self.closed_at

    def push(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self.opened_at is None:
            self.opened_at = len(self) if self.num_matched == len(self._thinking.markers.start) else None
        elif self.closed_at is None:
            self.closed_at = len(self) if self.num_matched == len(self._thinking.markers.end) else None

    def pop(self, num_tokens: int) -> None:
        if num_tokens:
            del self._token_ids[-num_tokens:]
        if self.closed_at is not None and self.closed_at > len(self):
            self.closed_at = None
        if self.opened_at is not None and self.opened_at > len(self):
            self.opened_at = None


def _num_matched(marker: tuple[int, ...], token_ids: list[int], first: int = 0) -> int:
    """Return how many tokens at the end, from index `first` on, begin a marker."""
    end = len(token_ids)
    return next(n for n in range(min(len(marker), end - first), -1, -1) if (*token_ids[end - n :],) == marker[:n])


def reasoning_of(
    sequence: Sequence, text: str, thinking: Thinking | None, offsets: Callable[[list[int]], list[int]]
) -> Reasoning | None:
    """Return a sequence's thought and its other text, both without markers, or None if the job does not think.

    `text` is the output's text without its stop string, see `stopping.text_of`.
    """
    if thinking is None:
        return None
    output_ids = sequence.output_ids.tolist()
    thought = thinking.in_output(output_ids)
    if thought.opened_at is None:
        return Reasoning("", text, 0)
    num_start = len(thinking.markers.start) if thought.opened_at else 0
    num_tokens = thought.num_tokens - (thought.num_matched if thought.is_open else 0)  # the end may be half a marker
    end = thought.opened_at + num_tokens
    closed = len(output_ids) if thought.closed_at is None else thought.closed_at
    places = offsets(output_ids)
    before, behind = text[: places[thought.opened_at - num_start]], text[places[closed] :]
    return Reasoning(text[places[thought.opened_at] : places[end]], before + behind, num_tokens)


@dataclass(frozen=True)
class ThinkingRule:
    """`Rule` that limits a thought to a budget, then forces the closing marker; `text` rules all else."""

    thinking: Thinking
    budget: int | None  # tokens; None: no limit
    text: Rule | None = None  # rule of text outside the thought; None allows any text

    def start(self, sequence: Sequence) -> ThinkingConstraint:
        return ThinkingConstraint(self, sequence)


class ThinkingConstraint:
    """Budget, and a rule of the text, after some output tokens."""

    def __init__(self, rule: ThinkingRule, sequence: Sequence) -> None:
        self._markers, self._budget = rule.thinking.markers, rule.budget
        self._vocab_size = sequence.vocab_size
        self._thought = Thought(rule.thinking)
        self._text: Constraint | None = rule.text.start(sequence) if rule.text is not None else None

    def mask(self) -> np.ndarray | None:
        if (forced := self._forced()) is not None:
            return mask_of((forced,), self._vocab_size)
        if self._text is None or self._thought.is_open:
            return None
        mask = self._text.mask()
        if mask is None or self._thought.opened_at is not None or len(self._thought):
            return mask
        opened: np.ndarray = mask | mask_of(self._markers.start[:1], self._vocab_size)
        return opened

    def is_free(self, token_ids: list[int]) -> bool:
        thought, num_tokens = self._thought, len(token_ids)
        has_room = self._budget is None or thought.num_tokens + num_tokens < self._budget
        if self._text is not None:
            return thought.is_open and has_room and self._markers.end[-1] not in token_ids
        return thought.closed_at is not None or has_room

    def push(self, token_id: int) -> None:
        if (forced := self._forced()) is not None and token_id != forced:
            raise ConstraintError(f"found token {token_id} where the thought's marker goes on with {forced}")
        num_before = self._num_of_text()
        self._thought.push(token_id)
        if self._text is not None and self._num_of_text() > num_before:
            try:
                self._text.push(token_id)
            except ConstraintError:
                self._thought.pop(1)
                raise

    def pop(self, num_tokens: int) -> None:
        num_before = self._num_of_text()
        self._thought.pop(num_tokens)
        if self._text is not None and (num_gone := num_before - self._num_of_text()):
            self._text.pop(num_gone)

    def _forced(self) -> int | None:
        """Return the only allowed token, if a marker is forced."""
        thought = self._thought
        if thought.is_open:
            is_used_up = self._budget is not None and thought.num_tokens >= self._budget
            return self._markers.end[thought.num_matched] if is_used_up else None
        # text under a rule cannot continue a partial marker
        is_half_open = self._text is not None and thought.opened_at is None and thought.num_matched > 0
        return self._markers.start[thought.num_matched] if is_half_open else None

    def _num_of_text(self) -> int:
        thought = self._thought
        if thought.closed_at is not None:
            return len(thought) - thought.closed_at
        return len(thought) if thought.opened_at is None and thought.num_matched == MISSED else 0


# Thinking markers, named or known for the tokenizer or chat template.

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("◁think▷", "◁/think▷"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)


def markers_of(
    tokenizer: Any, encode: Callable[[str], list[int]], vocab_size: int, named: tuple[str, str] | None
) -> Markers | None:
    """Return the named markers, or the first known pair in the tokenizer or chat template.

    Raises ValueError, for the user, if the named markers are impossible.
    """
    pair = named or _own(tokenizer)
    if pair is None:
        return None
    start, end = (tuple(encode(text)) for text in pair)
    problem = _problem(pair, start, end, vocab_size)
    if problem and named:
        raise ValueError(f"--thinking-markers: {problem}")
    return None if problem else Markers(start, end, (pair[0].strip(), pair[1].strip()))


def _own(tokenizer: Any) -> tuple[str, str] | None:
    entries = tokenizer.get_vocab()
    templates = tokenizer.chat_template
    texts = [*templates.values()] if isinstance(templates, dict) else [templates or ""]
    for pair in KNOWN:
        if all(marker in entries for marker in pair):
            return pair
    return next((pair for pair in KNOWN if all(any(marker in text for text in texts) for marker in pair)), None)


def _problem(pair: tuple[str, str], start: tuple[int, ...], end: tuple[int, ...], vocab_size: int) -> str | None:
    for text, token_ids in zip(pair, (start, end), strict=True):
        if not token_ids or max(token_ids) >= vocab_size:
            return f"{text!r} has no tokens of the model's"
        if not text.strip():
            return f"found {text!r}, expected a text that is not blank"
    return f"found {pair[0]!r} twice, expected two that differ" if pair[0].strip() == pair[1].strip() else None
