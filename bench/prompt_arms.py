"""Generations from prompts that are read once, beside plain decoding."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bench.long import per_step
from bench.tables import Record
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchEngine, BenchError, Contestant, digest, encode, read_tokens
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, DraftCounters, Drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import Verification
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass(frozen=True)
class Prompts:
    """Prompts of `share` of the prefill length."""

    kind: Literal["books", "needle"] = "books"
    num_sequences: int = 1
    share: float = 1.0


def length_of(prompts: Prompts, prefill: int) -> int:
    return round(prefill * prompts.share)


NEEDLE = (
    "\n\nThe Quorvane ledger of Thessaly Brumidge names her five ships: Oskarrow 7194, Pellimore 3826, Harrowex 2468, "
    "Vantrice 5501.\n\n"
)  # found in no book, and hard to guess without reading it
NEEDLE_DEPTH = 10  # after a tenth of the prompt
NEEDLE_CUE = 3  # the prompt ends with its first third


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the needle's tokens that should follow, if any."""

    token_ids: list[int]
    expected_ids: list[int]


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, and a cache of all but its last token."""

    prompt: Prompt
    cache: FullKVCache

    def copy_to(self, target: TargetModel, num_tokens: int) -> ReadPrompt:
        cache = target.new_cache(len(self.prompt.token_ids) + num_tokens)
        cache.load(self.cache.kv(0, self.cache.length))
        return ReadPrompt(self.prompt, cache)


def num_text_tokens(prompts: Prompts, prefill: int) -> int:
    return prompts.num_sequences * length_of(prompts, prefill)


def make_prompts(prompts: Prompts, prefill: int, text_ids: list[int], files: ModelFiles) -> list[Prompt]:
    length = length_of(prompts, prefill)
    if prompts.kind == "needle":
        return [_with_needle(text_ids[:length], encode(files, NEEDLE))]
    return [Prompt(text_ids[i * length : (i + 1) * length], []) for i in range(prompts.num_sequences)]


def read_prompt(target: TargetModel, prompt: Prompt, num_tokens: int) -> ReadPrompt:
    cache = target.new_cache(len(prompt.token_ids) + num_tokens)
    read_tokens(target, cache, prompt.token_ids, [])
    return ReadPrompt(prompt, cache)


def _with_needle(text_ids: list[int], needle_ids: list[int]) -> Prompt:
    """Insert the needle into the text, and end with its beginning."""
    cue, rest = needle_ids[: len(needle_ids) // NEEDLE_CUE], needle_ids[len(needle_ids) // NEEDLE_CUE :]
    before = len(text_ids) // NEEDLE_DEPTH
    end = len(text_ids) - len(needle_ids) - len(cue)
    return Prompt([*text_ids[:before], *needle_ids, *text_ids[before:end], *cue], rest)


@dataclass(frozen=True)
class Moment:
    """Counts and seconds of a generation up to now, all sequences together."""

    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    seconds: float
    step_seconds: dict[str, float]  # propose, verify, commit
    draft: DraftCounters  # the drafter's own counts, if any


class TimedEngine(BenchEngine):
    """An engine that times its steps after the first, as the papers do."""

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        super().__init__(target, drafter)
        self.num_verifications, self._seconds, self._draft = 0, 0.0, drafter.counters
        self._after_first_step: Moment | None = None

    def step(self) -> list[tuple[Sequence, Verification]]:
        started = time.perf_counter()
        results = super().step()  # tokens are on the host then, also with a GPU
        self.num_verifications += sum(verification.num_steps for _, verification in results)
        self._seconds += time.perf_counter() - started
        self._after_first_step = self._after_first_step or self._now()
        return results

    @property
    def span(self) -> tuple[Moment, Moment]:
        """The measured span, from after the first step to now."""
        assert self._after_first_step is not None
        return self._after_first_step, self._now()

    def _now(self) -> Moment:
        own = self.counters
        counts = own.num_generation_tokens, own.num_steps, own.num_draft_tokens
        return Moment(*counts, self._seconds, dict(own.step_seconds), copy.deepcopy(self._draft))


def figures_of(generation: Contestant, plain: Contestant, expected_ids: list[int]) -> Record:
    """Compare a generation with plain decoding; rates are None without drafts.

    `acceptance` is by the full verification, `middle_acceptance` with a partial cache, `needle_share` by plain
    decoding.
    """
    counters, steps, (first, last) = (
        generation.engine.counters,
        generation.engine.num_verifications,
        generation.engine.span,
    )
    ms, plain_ms = _ms_per_token(generation), _ms_per_token(plain)
    tokens_per_step, drafted = last.num_tokens / steps, counters.num_draft_tokens / steps
    num_steps, draft = last.num_steps - first.num_steps, last.draft
    return {
        "num_tokens": last.num_tokens,
        "num_plain_tokens": len(plain.token_ids()),
        "ms_per_token": ms,
        "plain_ms_per_token": plain_ms,
        "speedup": plain_ms / ms,
        "speedup_bound": plain_ms / ms * (1 + drafted) / tokens_per_step,  # if all tokens of chains were right
        "acceptance": _share(counters.num_accepted_tokens, counters.num_draft_tokens),
        "middle_acceptance": _share(draft.num_agreed_nodes, draft.num_checked_nodes),
        "needle_share": _share(num_same(plain.sequences[0].output_ids, expected_ids), len(expected_ids)),
        "tokens_per_step": tokens_per_step,  # per sequence
        "drafted_per_step": drafted,
        "rounds_per_step": draft.num_rounds / steps,  # forwards with a partial cache
        "first_step_ms": 1000 * first.seconds,
        "step_ms": per_step(first.step_seconds, last.step_seconds, num_steps),
        "draft_ms": per_step(first.draft.seconds, last.draft.seconds, num_steps),
        "tokens_sha256": digest(generation.token_ids()),
    }


def _ms_per_token(generation: Contestant) -> float:
    first, last = generation.engine.span
    milliseconds: float = 1000 * (last.seconds - first.seconds) / (last.num_tokens - first.num_tokens)
    return milliseconds


def num_same(token_ids: np.ndarray, expected_ids: list[int]) -> int:
    return sum(int(found) == expected for found, expected in zip(token_ids, expected_ids, strict=False))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _token_ids(generation: Contestant) -> list[np.ndarray]:
    return [sequence.output_ids for sequence in generation.sequences]


LONG_PROMPT = 32_768  # after longer ones, plain decoding only runs for the first tokens
NUM_PLAIN_TOKENS = 64
NUM_TURNS = 8  # both take turns, so that disturbances hit both


def num_plain_tokens(num_tokens: int, prefill: int) -> int:
    return num_tokens if prefill <= LONG_PROMPT else min(NUM_PLAIN_TOKENS, num_tokens)


@dataclass
class PromptArms:
    """Runs arms from the same state."""

    target: TargetModel
    read: list[ReadPrompt]
    num_tokens: int  # after each prompt
    num_plain_tokens: int  # of them also with plain decoding
    seed: int
    top_p: float = 1.0  # at every temperature above 0
    _known: dict[float, list[np.ndarray]] = field(default_factory=dict)  # each sequence's first tokens by temperature

    def run(self, drafter: Drafter, temperature: float) -> tuple[Contestant, Contestant]:
        """Raises BenchError if the arms differ."""
        plain = self._start(AutoregressiveDrafter(), temperature, self.num_plain_tokens)
        generation = self._start(drafter, temperature, self.num_tokens)
        for turn in range(1, NUM_TURNS + 1):
            plain.generate_to(self.num_plain_tokens * turn // NUM_TURNS)
            generation.generate_to(self.num_tokens * turn // NUM_TURNS)
        self._compare(plain, temperature)
        self._compare(generation, temperature)
        return generation, plain

    def _start(self, drafter: Drafter, temperature: float, num_tokens: int) -> Contestant:
        top_p = self.top_p if temperature > 0 else 1.0
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, top_p=top_p, seed=self.seed, ignore_eos=True
        )
        sequences = [
            Sequence(str(number), prompt.prompt.token_ids, own, self.target.vocab_size, self.target.device)
            for number, prompt in enumerate(self.read)
            for own in [sampling.model_copy(update={"seed": self.seed + number})]
        ]
        caches = [prompt.cache.prefix(prompt.cache.length) for prompt in self.read]
        return Contestant("", TimedEngine(self.target, drafter), sequences, caches)

    def _compare(self, generation: Contestant, temperature: float) -> None:
        """Compare with plain decoding's tokens, then with the first arm's."""
        known = self._known.setdefault(temperature, _token_ids(generation))
        for number, (before, now) in enumerate(zip(known, _token_ids(generation), strict=True)):
            num_common = min(len(before), len(now))
            differs = np.nonzero(before[:num_common] != now[:num_common])[0]
            if len(differs):
                raise BenchError(
                    f"sequence {number}, token {differs[0]} at T = {temperature:g}: found {now[differs[0]]}, expected "
                    f"{before[differs[0]]} as said before from the same state; see whether `swiftbatch doctor` says "
                    "`exact` on this machine"
                )
        if len(_token_ids(generation)[0]) > len(known[0]):
            self._known[temperature] = _token_ids(generation)
