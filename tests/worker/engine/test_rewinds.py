"""A loop is removed and drawn anew."""

from __future__ import annotations

from typing import Any

import pytest

from bench.variants import BENCH_ENGINES, COMPARED, create_bench_drafter
from swiftbatch.jobs.checkpoints.token_log import Rewind
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.stopping import may_rewind, rewound
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.engine.test_repetition import ends_in_a_loop
from tests.worker.test_exactness import PROMPTS, decode

pytestmark = pytest.mark.long

NUM_TOKENS = 64
LOOP = {"max_pattern_size": 32, "min_count": 2, "action": "rewind", "max_rewinds": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.2},
    "adjusted": {"temperature": 0.5, "repetition_penalty": 0.95, "penalty_window": 20, "presence_penalty": -0.6},
}

Outcome = tuple[list[int], tuple[Rewind, ...], str | None]


def params_of(setting: str, **changes: Any) -> SamplingParams:
    fields = {"max_tokens": NUM_TOKENS, "seed": 18, "ignore_eos": True, "repetition_detection": LOOP}
    return SamplingParams.model_validate(fields | SETTINGS[setting] | changes)


@pytest.fixture(scope="module")
def prompts(embedded_files: object) -> list[list[int]]:
    codec = TextCodec(embedded_files)  # type: ignore[arg-type]
    return [codec.encode(prompt) for prompt in PROMPTS]


class Plain:
    """By definition, each noise stream has an endless text, cut at its loop."""

    def __init__(self, target: TargetModel, prompts: list[list[int]]) -> None:
        self.target, self._prompts = target, prompts
        self._outcomes: dict[str, list[Outcome]] = {}

    def sequences(self, setting: str) -> list[Sequence]:
        params, size = params_of(setting), self.target.vocab_size
        return [Sequence(f"s{number}", prompt, params, size) for number, prompt in enumerate(self._prompts)]

    def outcomes(self, setting: str) -> list[Outcome]:
        if setting not in self._outcomes:
            self._outcomes[setting] = [self._outcome(prompt, setting) for prompt in self._prompts]
        return self._outcomes[setting]

    def _outcome(self, prompt: list[int], setting: str) -> Outcome:
        params = params_of(setting)
        detection = params.repetition_detection
        assert detection is not None
        kept: list[int] = []
        rewinds: tuple[Rewind, ...] = ()
        while True:
            endless = params_of(setting, repetition_detection=None)
            sequence = Sequence("plain", prompt, endless, self.target.vocab_size)
            sequence.set_rewinds(rewinds)
            sequence.extend(kept)
            [output] = decode(self.target, "autoregressive", [sequence])
            ends = (end for end in range(len(kept) + 1, NUM_TOKENS) if ends_in_a_loop(output[:end], detection))
            end = next(ends, None)
            if end is None:
                return output, rewinds, "length"
            if len(rewinds) == detection.max_rewinds:
                return output[:end], rewinds, "repetition"
            kept = before_the_repetitions(output[:end])
            rewinds = (*rewinds, Rewind(end, len(kept)))


def before_the_repetitions(output: list[int]) -> list[int]:
    """Return an output cut after the first of its shortest repeated pattern."""
    whole = next(n for n in range(1, len(output)) if output[-n:] == output[-2 * n : -n])
    loop = output[-2 * whole :]
    size = next(n for n in range(1, whole + 1) if loop[n:] == loop[:-n])
    end = len(output)
    while end > size and output[end - 1] == output[end - 1 - size]:
        end -= 1
    return output[:end]


@pytest.fixture(scope="module")
def plain(target: TargetModel, prompts: list[list[int]]) -> Plain:
    return Plain(target, prompts)


def run(target: TargetModel, engine_name: str, sequences: list[Sequence]) -> list[Outcome]:
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    for sequence in sequences:
        engine.start(sequence)
    ended: dict[str, Sequence] = {}
    while engine.sequences:
        for sequence in [each for each in engine.sequences if each.finish_reason is not None]:
            if may_rewind(sequence):
                engine.replace(rewound(sequence))
            else:
                engine.stop(sequence)
                ended[sequence.sequence_id] = sequence
        engine.step()
    found = [ended[sequence.sequence_id] for sequence in sequences]
    return [(each.output_ids.tolist(), each.rewinds, each.finish_reason) for each in found]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("setting", "engine_name"),
    [
        pytest.param(
            setting, name, marks=() if name == "auto" or (is_hardest and name not in COMPARED) else pytest.mark.slow
        )
        for setting, is_hardest in {"sampled": False, "adjusted": True}.items()
        for name in BENCH_ENGINES
    ],
)
def test_every_engine_takes_the_same_loops_back_and_draws_the_same_tokens(
    plain: Plain, engine_name: str, setting: str
) -> None:
    assert run(plain.target, engine_name, plain.sequences(setting)) == plain.outcomes(setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_these_texts_have_rewinds_and_loops_behind_the_last_one(plain: Plain, setting: str) -> None:
    outcomes = plain.outcomes(setting)
    assert sum(len(rewinds) for _, rewinds, _ in outcomes) >= 2
    for output, rewinds, reason in outcomes:
        assert all(rewind.num_kept < rewind.num_tokens for rewind in rewinds)
        assert (reason == "length") == (len(output) == NUM_TOKENS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_a_sequence_that_is_resumed_around_its_rewinds_goes_on_with_the_same_tokens(
    plain: Plain, engine_name: str
) -> None:
    """Before, at and after the last rewind, from the log's tokens and rewinds."""
    endings = plain.outcomes("adjusted")
    number = max(range(len(endings)), key=lambda i: len(endings[i][1]))
    output, rewinds, _ = endings[number]
    points = [(len(rewinds), n) for n in (rewinds[-1].num_kept, rewinds[-1].num_kept + 1, len(output))]
    for num_rewinds, num_tokens in points:
        sequence = plain.sequences("adjusted")[number]
        sequence.set_rewinds(rewinds[:num_rewinds])
        sequence.extend(output[:num_tokens])
        assert run(plain.target, engine_name, [sequence]) == [endings[number]]


def test_at_temperature_0_a_loop_is_the_end(plain: Plain, prompts: list[list[int]]) -> None:
    params = params_of("sampled", temperature=0.0)
    sequence = Sequence("greedy", prompts[0], params, plain.target.vocab_size)
    [(output, rewinds, reason)] = run(plain.target, "suffix", [sequence])
    assert (len(output) < NUM_TOKENS, rewinds, reason) == (True, (), "repetition")
