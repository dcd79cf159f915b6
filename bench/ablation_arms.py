"""Generations of several sequences behind prompts that were read before, and what they say next to plain decoding."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import numpy as np

from bench.ablation_prompts import ReadPrompt
from bench.long_figures import per_step
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.bench_texts import BenchEngine, BenchError
from swiftbatch.worker.decode_bench import OwnPositions, digest
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.drafters.drafter_interface import DraftCounters, Drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence

DIGITS = 4


@dataclass(frozen=True)
class Moment:
    """The counts and times of a generation at a moment, all sequences together. Times in seconds."""

    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    seconds: float
    step_seconds: dict[str, float]  # propose, verify, commit
    draft: DraftCounters  # what proposing is made of, where the drafter tells


class PromptGeneration:
    """Generates behind all prompts at once, in parts: between them it keeps only its own positions of their caches."""

    def __init__(self, target: TargetModel, drafter: Drafter, read: list[ReadPrompt], sampling: SamplingParams) -> None:
        """Sequence i draws with seed + i."""
        self.num_verifications = 0  # steps, counted for each sequence
        self._after_first_step: Moment | None = None
        self._draft = drafter.counters
        self._seconds = 0.0
        self._engine = BenchEngine(target, drafter)
        self.counters = self._engine.counters
        self._sequences: list[Sequence] = []
        self._own: list[OwnPositions] = []
        for number, prompt in enumerate(read):
            own = sampling.model_copy(update={"seed": (sampling.seed or 0) + number})
            sequence = Sequence(str(number), prompt.prompt.token_ids, own, target.vocab_size, target.device)
            cache = prompt.cache.prefix(prompt.cache.length)
            self._sequences.append(sequence)
            self._own.append(OwnPositions(cache))
            self._engine.start(sequence, cache)

    @property
    def token_ids(self) -> list[np.ndarray]:
        """The generated tokens of each sequence, `[num_generated]`."""
        return [sequence.output_ids for sequence in self._sequences]

    @property
    def now(self) -> Moment:
        counters = self.counters
        return Moment(
            num_tokens=sum(len(ids) for ids in self.token_ids),
            num_steps=counters.num_steps,
            num_draft_tokens=counters.num_draft_tokens,
            seconds=self._seconds,
            step_seconds=dict(counters.step_seconds),
            draft=copy.deepcopy(self._draft),
        )

    @property
    def span(self) -> tuple[Moment, Moment]:
        """The span that is measured: from behind the first step to now. Raises ValueError before the first step."""
        if self._after_first_step is None:
            raise ValueError("nothing was generated yet; run the generation first")
        return self._after_first_step, self.now

    def run_to(self, num_tokens: int) -> None:
        """Go on until every sequence has at least `num_tokens` tokens."""
        for own in self._own:
            own.put_back()
        while any(sequence.num_generated_tokens < num_tokens for sequence in self._sequences):
            self._step()
        for own in self._own:
            own.take_away()

    def _step(self) -> None:
        started = time.perf_counter()
        results = self._engine.step()  # ends with its tokens on the host, on a GPU too
        self.num_verifications += sum(verification.num_steps for _, verification in results)
        self._seconds += time.perf_counter() - started
        self._after_first_step = self._after_first_step or self.now


class PromptFigures(Frozen):
    """One generation next to plain decoding of its first tokens. Rates are None where nothing was drafted.

    All times begin behind the first step, as in the paper: it reads what the draft model sees and builds its cache.
    """

    num_tokens: int  # of all sequences
    num_plain_tokens: int
    ms_per_token: float
    plain_ms_per_token: float
    speedup: float
    acceptance: float | None  # accepted by the full verification, of those that were drafted for it
    middle_acceptance: float | None  # agreed by the target with a partial cache, of those that it checked
    needle_share: float | None  # share of the needle's tokens that plain decoding puts where they belong
    tokens_per_step: float  # of one sequence
    drafted_per_step: float
    rounds_per_step: float  # forwards with a partial cache
    first_step_ms: float
    step_ms: dict[str, float]  # per step of all sequences: propose, verify, commit
    draft_ms: dict[str, float]  # what proposing is made of
    tokens_sha256: str  # over the generated ids as little-endian uint32, sequence behind sequence

    @classmethod
    def of(cls, generation: PromptGeneration, plain: PromptGeneration, expected_ids: list[int]) -> PromptFigures:
        """Figures of a generation and of plain decoding behind the same prompts."""
        counters, steps = generation.counters, generation.num_verifications
        first, last = generation.span
        draft = last.draft
        ms, plain_ms = _ms_per_token(generation), _ms_per_token(plain)
        return cls(
            num_tokens=last.num_tokens,
            num_plain_tokens=plain.now.num_tokens,
            ms_per_token=round(ms, DIGITS),
            plain_ms_per_token=round(plain_ms, DIGITS),
            speedup=round(plain_ms / ms, DIGITS),
            acceptance=_share(counters.num_accepted_tokens, counters.num_draft_tokens),
            middle_acceptance=_share(draft.num_agreed_nodes, draft.num_checked_nodes),
            needle_share=_share(num_same(plain.token_ids[0], expected_ids), len(expected_ids)),
            tokens_per_step=round(last.num_tokens / steps, DIGITS),
            drafted_per_step=round(counters.num_draft_tokens / steps, DIGITS),
            rounds_per_step=round(draft.num_rounds / steps, DIGITS),
            first_step_ms=round(1000 * first.seconds, DIGITS),
            step_ms=per_step(first.step_seconds, last.step_seconds, last.num_steps - first.num_steps),
            draft_ms=per_step(first.draft.seconds, last.draft.seconds, last.num_steps - first.num_steps),
            tokens_sha256=digest(*generation.token_ids),
        )


def _ms_per_token(generation: PromptGeneration) -> float:
    first, last = generation.span
    return 1000 * (last.seconds - first.seconds) / (last.num_tokens - first.num_tokens)


def num_same(token_ids: np.ndarray, expected_ids: list[int]) -> int:
    """Count the expected tokens that stand where they belong."""
    return sum(int(found) == expected for found, expected in zip(token_ids, expected_ids, strict=False))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, DIGITS) if whole else None


LONG_PROMPT = 32_768  # behind a longer one plain decoding is measured for its first tokens only
NUM_PLAIN_TOKENS = 64
NUM_TURNS = 8  # a generation and plain decoding take turns, so that a busy moment of the machine hits both


def num_plain_tokens(num_tokens: int, prefill: int) -> int:
    """Return how many of an arm's tokens plain decoding generates as well, behind prompts of so many tokens."""
    return num_tokens if prefill <= LONG_PROMPT else min(NUM_PLAIN_TOKENS, num_tokens)


class PromptArms:
    """Runs arms one after the other from the same state."""

    def __init__(
        self,
        target: TargetModel,
        read: list[ReadPrompt],
        num_tokens: int,
        num_plain_tokens: int,
        seed: int,
        top_p: float = 1.0,
    ) -> None:
        """`num_tokens` behind each prompt, `num_plain_tokens` of them with plain decoding as well.

        `top_p` is at every temperature above 0.
        """
        self.target = target
        self._read = read
        self._num_tokens = num_tokens
        self._num_plain_tokens = num_plain_tokens
        self._seed = seed
        self._top_p = top_p
        self._known: dict[float, list[np.ndarray]] = {}  # by temperature, what was said first, of each sequence

    def run(self, drafter: Drafter, temperature: float) -> tuple[PromptGeneration, PromptGeneration]:
        """Generate with an arm's drafter and plainly, in turn. Raises BenchError where they do not say the same."""
        plain = self._start(AutoregressiveDrafter(), temperature, self._num_plain_tokens)
        generation = self._start(drafter, temperature, self._num_tokens)
        for turn in range(1, NUM_TURNS + 1):
            plain.run_to(self._num_plain_tokens * turn // NUM_TURNS)
            generation.run_to(self._num_tokens * turn // NUM_TURNS)
        self._compare(plain, temperature)
        self._compare(generation, temperature)
        return generation, plain

    def _start(self, drafter: Drafter, temperature: float, num_tokens: int) -> PromptGeneration:
        top_p = self._top_p if temperature > 0 else 1.0
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, top_p=top_p, seed=self._seed, ignore_eos=True
        )
        return PromptGeneration(self.target, drafter, self._read, sampling)

    def _compare(self, generation: PromptGeneration, temperature: float) -> None:
        """Compare with plain decoding's tokens, and beyond them with those of the first arm at this temperature."""
        known = self._known.setdefault(temperature, generation.token_ids)
        for number, (before, now) in enumerate(zip(known, generation.token_ids, strict=True)):
            num_common = min(len(before), len(now))
            differs = np.nonzero(before[:num_common] != now[:num_common])[0]
            if len(differs):
                raise BenchError(
                    f"sequence {number}, token {differs[0]} at T = {temperature:g}: found {now[differs[0]]}, expected "
                    f"{before[differs[0]]} as said before from the same state; see whether `swiftbatch doctor` says "
                    "`exact` on this machine"
                )
        if len(generation.token_ids[0]) > len(known[0]):
            self._known[temperature] = generation.token_ids
