from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.long import METERED, Options, PlainWindows, generated, integral, metered_drafter, run, text_of
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchError, encode, read_tokens, text_tokens
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, Drafter, DraftRequest
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.engine.engine import Engine, PlainRuns
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.simulated_clock import SimulatedClock
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends

pytestmark = pytest.mark.long

NUM_TOKENS = 200
PREFILL = 40


@pytest.fixture
def make_options(tiny_model: Path, text: Path) -> Callable[..., Options]:
    def make(num_tokens: int = NUM_TOKENS, sampling: dict[str, object] | None = None, **changes: object) -> Options:
        drawn = {"num_tokens": num_tokens, "seed": 5, "temperature": 1.0, "min_p": 0.0} | (sampling or {})
        fields = {"model": str(tiny_model), "engine": "token-recycling", "text": text}
        fields |= {"prefill": PREFILL, "every": 50, "plain_every": 30}
        return Options.model_validate(fields | drawn | {"num_threads": 2} | changes)

    return make


class Oracle(Drafter):
    """Drafts the known continuation, or always something else, with a wrong node beside each."""

    def __init__(self, token_ids: np.ndarray, is_right: bool) -> None:
        self._token_ids = token_ids  # [length], prompt and output
        self._change = 0 if is_right else 1

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._tree(request.sequence, request.max_depth) for request in requests]

    def _tree(self, sequence: Sequence, max_depth: int) -> DraftTree:
        tree = DraftTree()
        parent = ROOT
        for coming in self._token_ids[len(sequence) :][: min(3, max_depth)].tolist():
            tree.token_ids.extend([(coming + each) % sequence.vocab_size for each in (2, self._change)])
            tree.parents.extend([parent, parent])
            parent = len(tree) - 1
        return tree


def known_tokens(target: TargetModel, options: Options) -> np.ndarray:
    """Return prompt and output of plain decoding, `[length]`."""
    assert options.text is not None
    prompt_ids = text_tokens(options.text, target.files, options.prefill)
    sequence = Sequence("plain", prompt_ids, options.sampling, target.vocab_size)
    run_to_ends(Engine(target, AutoregressiveDrafter()), sequence)
    return sequence.token_ids


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    """Each row of a step takes 10 ms, and nothing else takes time."""
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    verify = clock.taking(lambda target, groups, *_: 0.01 * sum(map(len, groups)), TargetModel.verify)
    walks = clock.taking(lambda runs, slots, num_steps: 0.01 * len(slots) * num_steps, PlainRuns.walks)
    monkeypatch.setattr(PlainRuns, "walks", walks)
    monkeypatch.setattr(TargetModel, "verify", verify)
    return clock


def test_windows_add_up_to_the_whole(make_options: Callable[..., Options], clock: SimulatedClock) -> None:
    records = list(run(make_options(engine="token-recycling")))
    assert [record["num_tokens"] // 50 for record in records] == [1, 2, 3, 4]
    total = records[-1]["total"]
    for name in ("seconds", "plain_seconds"):
        assert sum(record["window"][name] for record in records) == pytest.approx(total[name], abs=0.001)
    assert total["ms_per_token"] == pytest.approx(1000 * total["seconds"] / NUM_TOKENS, rel=0.01)
    assert total["speedup"] == pytest.approx(total["plain_seconds"] / total["seconds"], rel=0.01)
    assert records[-1]["distinct"].keys() == {f"distinct_{n}" for n in range(1, 5)}


@pytest.mark.parametrize(("is_right", "alpha"), [(True, 1.0), (False, 0.0)])
def test_alpha_is_accepted_over_drafted_depth(
    target: TargetModel, make_options: Callable[..., Options], is_right: bool, alpha: float
) -> None:
    options = make_options()
    oracle = Oracle(known_tokens(target, options), is_right)
    for record in generated(options, target, oracle, None):
        assert (record["window"]["alpha"], record["total"]["alpha"], record["total"]["beta"]) == (alpha, alpha, None)
        assert record["same_tokens"]


def test_plain_decoding_drafts_nothing(make_options: Callable[..., Options], clock: SimulatedClock) -> None:
    [*_, record] = run(make_options(engine="autoregressive"))
    total = record["total"]
    assert (total["alpha"], total["beta"], total["tokens_per_step"]) == (None, None, 1.0)
    assert total["speedup"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("engine", METERED)
def test_an_engine_whose_ngrams_are_counted_is_made_as_far_as_its_trained_heads(
    engine: str, target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="swiftbatch train tokenswift"):
        metered_drafter(engine, target, free_rows, tmp_path)


@pytest.mark.slow
def test_beta_is_the_part_of_alpha_that_reused_ngrams_brought(
    tiny_model: Path, tmp_path: Path, target: TargetModel, make_options: Callable[..., Options]
) -> None:
    folder = tmp_path / "with-heads"
    shutil.copytree(tiny_model, folder)
    save_heads(folder, torch.zeros(3, 64, 64), locate_model(str(folder)).fingerprint)
    greedy = {"temperature": 0.0}  # soon repeats itself
    [*_, record] = run(make_options(model=str(folder), engine="tokenswift-paper", sampling=greedy))
    total = record["total"]
    assert 0 < total["beta"] < total["alpha"] <= 1
    assert total["rounds_per_step"] > 0.8
    assert set(total["draft_ms"]) == {"follow", "propose", "check"}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"min_p": 0.1, "repetition_penalty": 1.2}])
def test_plain_windows_say_what_the_engine_then_says_and_change_nothing(
    make_options: Callable[..., Options], sampling: dict[str, object]
) -> None:
    [*_, often] = run(make_options(engine="suffix", sampling=sampling, plain_every=20))
    [*_, seldom] = run(make_options(engine="token-recycling", sampling=sampling, plain_every=1000, every=1000))
    assert often["tokens_sha256"] == seldom["tokens_sha256"]
    assert often["same_tokens"]


def test_another_text_than_plain_decodings_is_told(target: TargetModel) -> None:
    prompt = list(range(5, 45))
    sequence = Sequence("a", prompt, SamplingParams(max_tokens=60, seed=1, ignore_eos=True), target.vocab_size)
    cache = target.new_cache(sequence.max_length)
    read_tokens(target, cache, prompt, [])
    plain = PlainWindows(target, 8)
    plain.measure(sequence, cache)
    plain.measure(sequence, cache)  # nothing new here
    assert cache.length == len(prompt) - 1
    engine = Engine(target, Oracle(np.array(prompt), True))
    engine.start(sequence, cache)
    while sequence.num_generated_tokens < 8:
        assert plain.compared(sequence.output_ids) == [True], "as far as there are tokens"
        engine.step()
    assert plain.compared(sequence.output_ids) == [True]
    assert plain.compared(sequence.output_ids ^ 1) == [False]


def test_the_time_of_the_pauses_does_not_count(
    make_options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    undisturbed = list(run(make_options()))
    pauses, measure = [], PlainWindows.measure

    def slow_measure(*args: object) -> None:
        clock.now += 1000.0
        pauses.append(clock.now)
        measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PlainWindows, "measure", slow_measure)
    disturbed = list(run(make_options()))
    assert len(pauses) >= 8
    before, after = ([record["total"]["seconds"] for record in records] for records in (undisturbed, disturbed))
    assert after == pytest.approx(before, rel=0.2)  # a pause is a thousand seconds; a step may bring other tokens


def test_the_integral_goes_through_all_points() -> None:
    assert integral([0, 10, 30], [1.0, 3.0, 5.0], 0, 30) == pytest.approx(20 + 80)
    assert integral([0, 10, 30], [1.0, 3.0, 5.0], 5, 20) == pytest.approx(12.5 + 35)
    assert integral([0, 10], [1.0, 3.0], 5, 14) == pytest.approx(12.5 + 12)
    assert integral([3], [2.0], 0, 10) == pytest.approx(20)


def test_a_run_beyond_the_model_is_refused(make_options: Callable[..., Options]) -> None:
    with pytest.raises(BenchError, match=r"40 \+ 4090 tokens: .* has 4096 positions only"):
        next(run(make_options(4090)))


def test_a_text_that_is_too_short_is_refused(make_options: Callable[..., Options]) -> None:
    with pytest.raises(BenchError, match="needs 3000"):
        next(run(make_options(prefill=3000)))


def test_stops_cover_the_generation_to_its_end(make_options: Callable[..., Options]) -> None:
    options = make_options(100_000, every=20_000, plain_every=2500)
    assert options.record_stops() == [20_000, 40_000, 60_000, 80_000, 100_000]
    assert options.plain_stops() == [*range(0, 100_000, 2500), 99_976]
    assert make_options(10, every=20_000).plain_stops() == [0]


def test_the_loop_is_shown_in_one_line_beside_the_whole_text(target: TargetModel) -> None:
    ids = encode(target.files, "the lazy\n\nfox ")
    prompt = Sequence("long", [5], SamplingParams(max_tokens=500, ignore_eos=True), target.vocab_size)
    for output_ids, loop in (([*range(50, 90), *ids * 40], "the lazy fox the"), (list(range(50, 90)), None)):
        found = text_of(target, prompt.with_output(output_ids))
        assert found["text"].endswith("\n\nfox ") == (loop is not None)
        assert found["loop"] is None if loop is None else found["loop"].startswith(loop)
