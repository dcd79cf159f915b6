"""Several plain steps in one native call equal single steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.choice.policy import FEWEST_STEPS
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.engine.engine import FEW_STEPS, MOST_STEPS, Engine, PlainRuns
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import dear_rows, free_rows
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.kind_parts import native_target

pytestmark = needs_kernels
LENGTHS = (60, 30)  # of prompts; runs pass the end of a block in each sequence
NUM_TOKENS = 4 * MOST_STEPS
SAMPLERS: dict[str, dict[str, object]] = {
    "T=0": {"temperature": 0.0},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "penalty_window": 5, "frequency_penalty": 0.5},
    "ends": {"temperature": 1.0, "stop_token_ids": [*range(3, 40)], "min_tokens": 6, "min_p": 0.01},
}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """`undo` switches to single steps."""
    monkeypatch.setattr(PlainRuns, "most_steps", lambda *_: 1)
    return monkeypatch


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes runs as long as possible."""
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MOST_SECONDS", 1e9)


def begun(target: TargetModel, fields: dict[str, object], engine: Engine | None = None) -> Engine:
    engine = engine or Engine(target, AutoregressiveDrafter())
    for number, length in enumerate(LENGTHS):
        text = np.random.default_rng(number).integers(5, 60, length).tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, **fields)  # type: ignore[arg-type]
        engine.start(Sequence(str(number), text, params, target.vocab_size))
    return engine


def outcome(engine: Engine, drafts: bool = False) -> list[tuple[object, ...]]:
    """Return keys and values before the last token too: those of a drafted last token depend on time."""
    found = []
    slots = list(engine._slots.values())
    while any(sequence.finish_reason is None for sequence in engine.sequences):
        engine.step()
    for slot in slots:
        tokens, cache = slot.sequence.output_ids.tolist(), slot.cache
        num_read = slot.sequence.num_prompt_tokens + len(tokens) - 1
        assert num_read <= cache.length <= num_read + drafts
        found.append((tokens, slot.sequence.finish_reason, cache.kv(0, num_read).tobytes()))
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_runs_bring_the_tokens_and_the_cache_of_steps_one_by_one(
    target: TargetModel, sampler: str, one_by_one: pytest.MonkeyPatch
) -> None:
    stepped = begun(target, SAMPLERS[sampler])
    expected = outcome(stepped)
    one_by_one.undo()
    run = begun(target, SAMPLERS[sampler])
    assert outcome(run) == expected
    assert run.counters.num_steps <= stepped.counters.num_steps
    assert run.counters.num_generation_tokens == stepped.counters.num_generation_tokens
    assert run.counters.num_tokens_by_draft == stepped.counters.num_tokens_by_draft


def test_layers_with_windows_see_the_same_in_a_run(tmp_path: Path, one_by_one: pytest.MonkeyPatch) -> None:
    windowed = native_target("gemma3_text", tmp_path)
    expected = outcome(begun(windowed, SAMPLERS["penalties"]))
    one_by_one.undo()
    assert outcome(begun(windowed, SAMPLERS["penalties"])) == expected


def test_a_step_brings_as_many_tokens_as_a_run_has_and_none_behind_an_end(target: TargetModel) -> None:
    engine = begun(target, {"temperature": 1.0})
    sizes = [[len(verification.committed_ids) for _, verification in engine.step()] for _ in range(3)]
    assert sizes == [[1, 1], [MOST_STEPS, MOST_STEPS], [MOST_STEPS, MOST_STEPS]]  # the first is timed
    engine = begun(target, {"temperature": 1.0})
    ends = {first.sequence.output_ids[2] for first in [engine._slots["0"]] if engine.step() and engine.step()}
    again = begun(target, {"temperature": 1.0, "stop_token_ids": [int(end) for end in ends]})
    again.step()
    brought = again.step()
    assert len(brought[0][1].committed_ids) == len(brought[1][1].committed_ids) < MOST_STEPS
    assert again.sequences[0].finish_reason == "stop"


def test_what_needs_each_step_s_logits_or_masks_takes_steps_one_by_one(target: TargetModel) -> None:
    engine = begun(target, {"temperature": 1.0, "logprobs": 2})
    assert [len(verification.committed_ids) for _ in range(4) for _, verification in engine.step()] == [1] * 8


def test_a_sequence_that_nothing_can_be_drawn_for_fails_alone(target: TargetModel) -> None:
    engine = begun(target, {"temperature": 1.0})
    engine.step()
    cache = engine._slots["0"].cache
    for layer in range(target.cache_shape.num_layers):
        cache.layer(layer)[1].fill_(np.nan)
    engine.step()
    failed, other = engine.sequences
    assert failed.finish_reason == "error"
    assert other.finish_reason is None
    alone = begun(target, {"temperature": 1.0})
    assert outcome(alone)[1][0][: other.num_generated_tokens] == other.output_ids.tolist()


def test_auto_lets_plain_steps_pass_at_once_and_is_told_how_many(
    target: TargetModel, one_by_one: pytest.MonkeyPatch
) -> None:
    expected = outcome(begun(target, {"temperature": 1.0}, Engine(target, auto(target, free_rows, None))), drafts=True)
    one_by_one.undo()
    engine = begun(target, {"temperature": 1.0}, Engine(target, auto(target, free_rows, None)))
    assert outcome(engine, drafts=True) == expected


def test_runs_are_short_where_more_than_a_token_may_end_a_sequence(target: TargetModel) -> None:
    engine = begun(target, {"temperature": 1.0, "repetition_detection": {"max_pattern_size": 4, "min_count": 30}})
    sizes = [len(verification.committed_ids) for _ in range(4) for _, verification in engine.step()]
    assert sizes == [1, 1, *[FEW_STEPS] * 6]


def test_runs_of_auto_become_as_long_as_can_be_where_nothing_repeats_itself(target: TargetModel) -> None:
    engine = begun(target, {"temperature": 1.0}, Engine(target, auto(target, dear_rows, None)))
    sizes = [len(engine.step()[0][1].committed_ids) for _ in range(4)]
    # the second call ends with the first look at what was measured, soon where forwards are long
    assert sizes[:2] == [1, 2 * FEWEST_STEPS - 1]
    assert min(sizes[2:]) > FEW_STEPS


def test_auto_looks_soon_again_where_a_text_repeats_itself(target: TargetModel) -> None:
    engine = Engine(target, auto(target, free_rows, None))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    engine.start(Sequence("repeats", [7, 8, 9, 10, 11] * 20, params, target.vocab_size))
    steps = [verification for _ in range(8) for _, verification in engine.step()]
    assert max(each.num_steps for each in steps) <= FEW_STEPS
    assert max(len(each.tree) for each in steps) > 0


def test_runs_go_by_what_the_newest_steps_took_however_many_short_ones_came_before(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MOST_SECONDS", 0.1)
    slots, counters = [*begun(target, {"temperature": 1.0})._slots.values()], EngineCounters()
    runs, sizes = PlainRuns(target, counters), []
    for num_steps, seconds in ((0, 0.0), (10_000, 0.001), (32, 0.05), (2, 0.2), (1, 0.01), (10, 0.001)):
        counters.num_steps += num_steps
        counters.step_seconds["verify"] += num_steps * seconds
        sizes.append(runs.most_steps(slots))
    assert sizes == [1, MOST_STEPS, 2, 1, 10, MOST_STEPS]


def test_runs_are_shorter_where_more_rows_come_or_longer_texts(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MOST_SECONDS", 0.1)
    monkeypatch.setattr("swiftbatch.worker.engine.engine.FEW_POSITIONS", 20)
    first, second = begun(target, {"temperature": 1.0})._slots.values()
    first.cache.advance(20)
    second.cache.advance(25)
    counters = EngineCounters()
    runs, sizes = PlainRuns(target, counters), []
    for slots in ([first], [first], [first, second], [first, second]):
        sizes.append(runs.most_steps(slots))
        counters.num_steps += 1
        counters.step_seconds["verify"] += 0.005
    first.cache.advance(90)
    sizes.append(runs.most_steps([first, second]))
    assert sizes == [1, 20, 8, 20, 6]
