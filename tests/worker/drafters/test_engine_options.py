"""Engine options are checked, named in errors, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import ENGINES, PAPER_ENGINES, create_drafter, engine_entry, slots_wanted
from swiftbatch.worker.drafters.engine_options import PartialCacheOptions, TokenSwiftOptions
from swiftbatch.worker.drafters.griffin.draft_forwards import GriffinForwards
from swiftbatch.worker.drafters.griffin.draft_input import Candidates
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends

NUM_TOKENS = 90
CHANGES = {
    "tokenswift": [("cache=importance", "rounds=2"), ("cache=retrieval", "stride=16", "budget=64", "rounds=1")],
    "triforce": [("width=3", "at_every_step=true", "gamma_1=3", "gamma_2=4"), ("window=16", "budget=prompt")],
    "griffin": [("context=whole", "at_every_step=true"), ("max_nodes=5", "max_depth=2", "breadth=2")],
    "token-recycling-paper": [("update=first", "tree=measured"), ("update=merged", "candidates=3", "with_noise=no")],
    "tokenswift-paper": [("tree=2,2", "ngram_size=3", "num_ngrams=5"), ("tree=127", "num_ngrams=0", "recycles=true")],
    "triforce-paper": [("budget=48", "stride=20", "rebuild_below=0.9", "chunk_size=4"), ("gamma_1=0",)],
    "griffin-paper": [("context=whole",), ("breadth=31", "max_depth=5", "max_nodes=127")],
}


def generated(target: TargetModel, engine: str, options: tuple[str, ...] = ()) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=4, ignore_eos=True, temperature=0.8, repetition_penalty=1.1)
    sequence = Sequence("a", [5 + i % 30 for i in range(40)], params, target.vocab_size)
    run_to_ends(Engine(target, create_drafter(engine, target, free_rows, None, options)), sequence)
    return sequence.output_ids.tolist()


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> list[int]:
    return generated(target, "autoregressive")


def test_every_engine_with_options_is_tried_with_others() -> None:
    with_options = {name for name, entry in (ENGINES | PAPER_ENGINES).items() if entry.options is not None}
    assert CHANGES.keys() == with_options


@pytest.mark.parametrize(("engine", "options"), [(name, each) for name, some in CHANGES.items() for each in some])
def test_options_change_no_token(target: TargetModel, plain: list[int], engine: str, options: tuple[str, ...]) -> None:
    assert engine_entry(engine, options).options != engine_entry(engine).options
    assert generated(target, engine, options) == plain


@pytest.mark.parametrize(
    ("engine", "option", "message"),
    [
        (
            "tokenswift",
            "budgt=3",
            r'"budgt" .did you mean budget.., expected one of: cache, budget, chunk_size, stride',
        ),
        ("tokenswift", "budget=-1", r"field 'budget': found \"-1\", expected a value greater than or equal to 0"),
        ("tokenswift", "tree=3,x", r"field 'tree\[1\]': found \"x\", expected a valid integer"),
        ("tokenswift", "stride=9", r"stride: an option of cache=retrieval, found cache=summary"),
        ("triforce", "gamma_2=63", r"gamma_1 \+ gamma_2: found 2 \+ 63, expected at most 64"),
        ("triforce", "gamma_1", r"--engine-option gamma_1: expected NAME=VALUE"),
        ("triforce", "a\nb", r'--engine-option "a\\nb": expected NAME=VALUE'),
        ("tokenswift", "tree=128", r"field 'tree\[0\]': found \"128\", expected a value less than or equal to 127"),
        ("tokenswift", "budget=1048577", r"field 'budget': .* expected a value less than or equal to 1048576"),
        ("triforce-paper", "chunk_size=4097", r"field 'chunk_size': .* expected a value less than or equal to 4096"),
        ("griffin-paper", "breadth=26", r"breadth \* \(max_depth - 1\): found 130, expected at most 127"),
        ("griffin-paper", "context=all", r"field 'context': found \"all\", expected 'window' or 'whole'"),
        ("suffix", "width=2", r"--engine-option width=2: engine suffix has no options; see docs/engines.md"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(engine: str, option: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        engine_entry(engine, (option,))
    assert "\n" not in str(refused.value)


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="--engine-option width=3: given twice"):
        engine_entry("triforce", ("width=2", "width=3"))


def test_a_budget_is_the_prompts_length_within_bounds() -> None:
    options = TokenSwiftOptions(budget="prompt")  # type: ignore[arg-type]  # as a user writes it
    assert [options.budget_of(length) for length in (3, 300, 100_000)] == [256, 300, 8192]
    assert options.partial_budget == 8192
    assert TokenSwiftOptions(budget=70).budget_of(3) == 70


def test_slots_have_room_for_the_options_caches(tiny_model: Path) -> None:
    files = locate_model(str(tiny_model))
    found = slots_wanted("triforce", files, "float32", 900, None, ("cache=retrieval", "budget=128", "window=32"))
    assert (found.partial_budget, found.partial_chunk, found.draft_length) == (128, 8, 16 + 2 * 32 + 64)
    assert engine_entry("suffix").slots(900) == SlotsWanted(900)
    assert PartialCacheOptions(cache="importance").partial_chunk == 0


def drafted(target: TargetModel, engine: str, *options: str) -> Engine:
    params = SamplingParams(max_tokens=4, seed=4, ignore_eos=True, temperature=0.8)
    sequence = Sequence("a", [5 + i % 30 for i in range(900)], params, target.vocab_size)
    runner = Engine(target, create_drafter(engine, target, free_rows, None, options))
    run_to_ends(runner, sequence)
    return runner


def test_a_width_adds_candidates_to_each_draft_token(target: TargetModel) -> None:
    narrow, wide = (drafted(target, "triforce-paper", "gamma_1=2", f"width={width}") for width in (1, 3))
    assert wide.drafter.counters.num_checked_nodes > narrow.drafter.counters.num_checked_nodes


def test_the_whole_context_is_read_by_griffin_s_layer(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    follow = GriffinForwards.follow

    def noted(forwards: GriffinForwards, sequences: list[Sequence]) -> list[Candidates]:
        found = follow(forwards, sequences)
        read.append(next(iter(forwards._contexts.values())).room.cache.length)
        return found

    monkeypatch.setattr(GriffinForwards, "follow", noted)
    drafted(target, "griffin-paper", "context=whole")
    whole, read[:] = read[0], []
    drafted(target, "griffin-paper")
    assert read[0] < 600 < 899 <= whole
