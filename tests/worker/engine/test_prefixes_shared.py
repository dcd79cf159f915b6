"""A common beginning is read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.variants import BENCH_ENGINES, COMPARED
from swiftbatch.jobs.shared_prompts import prompt_keys, shared_prompts
from swiftbatch.worker.engine.prefill import SHORTEST
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.engine.prefix_parts import decode, new_engine, rows_of, sequence, text, to_the_end
from tests.worker.model.kind_parts import native_target, tiny_target

pytestmark = pytest.mark.long

ENGINES = [name for name in BENCH_ENGINES if name not in COMPARED]
NUM_SHARED = 300


def three(target: TargetModel, num_tokens: int = 8) -> list[Sequence]:
    """The last two share more than with the first."""
    book = text(1, NUM_SHARED, target.vocab_size)
    tails = [text(2, 40, target.vocab_size), text(3, 100, target.vocab_size)]
    prompts = [book + tails[0], book + tails[1], book + tails[1][:90] + tails[0]]
    return [sequence(target, "s" * (1 + i), prompt, num_tokens) for i, prompt in enumerate(prompts)]


def held_against_each_alone(target: TargetModel, engine_name: str, num_tokens: int) -> None:
    alone = [decode(new_engine(target), [each])[0] for each in three(target, num_tokens)]
    engine = new_engine(target, engine_name)
    slots = decode(engine, three(target, num_tokens))
    assert [slot.sequence.output_ids.tolist() for slot in slots] == [a.sequence.output_ids.tolist() for a in alone]
    assert [rows_of(slot) for slot in slots] == [rows_of(slot) for slot in alone]
    assert engine.counters.num_read_tokens == NUM_SHARED + 39 + 99 + 39
    assert engine.counters.num_copied_tokens == NUM_SHARED + NUM_SHARED + 90


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine_name", ENGINES)
def test_every_engine_gives_a_copied_prompt_the_bits_and_tokens_of_one_read_alone(
    target: TargetModel, engine_name: str
) -> None:
    held_against_each_alone(target, engine_name, 24)


def test_in_float32_bits_and_tokens_are_the_same_too(embedded_targets: dict[str, TargetModel]) -> None:
    held_against_each_alone(embedded_targets["float32"], "token-recycling", 24)


@pytest.mark.parametrize("kind", ["mistral", "llama4_text", "gpt_oss"])
def test_windows_chunks_and_experts_change_nothing(kind: str) -> None:
    held_against_each_alone(tiny_target(kind, window=40), "token-recycling", 8)


def test_latent_vectors_are_copied_as_keys_and_values_are(tmp_path: Path) -> None:
    held_against_each_alone(native_target("deepseek_v3", tmp_path), "token-recycling", 8)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")


def test_others_wait_for_the_first_and_decode_meanwhile(tiny: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.prefill.PREFILL_SECONDS", 1e-4)
    book, engine = text(1, 600, tiny.vocab_size), new_engine(tiny)
    other = sequence(tiny, "other", text(9, 5, tiny.vocab_size), 50)
    first, second = sequence(tiny, "a", book), sequence(tiny, "bb", book)
    for each in (other, first, second):
        engine.start(each)
    to_the_end(engine, [first])
    assert engine.counters.num_read_tokens == 4 + 599
    assert other.num_generated_tokens > 2
    to_the_end(engine, [second, other])
    assert engine.counters.num_copied_tokens == 599


def test_choices_of_one_prompt_read_it_once(tiny: TargetModel) -> None:
    engine, prompt = new_engine(tiny), text(1, 500, tiny.vocab_size)
    decode(engine, [sequence(tiny, "x" * n, prompt) for n in range(1, 9)])
    assert engine.counters.num_read_tokens == 499
    assert engine.counters.num_copied_tokens == 7 * 499


def test_who_waits_for_one_that_leaves_goes_on_where_it_was(tiny: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.prefill.PREFILL_SECONDS", 1e-4)
    book, engine = text(1, 600, tiny.vocab_size), new_engine(tiny)
    first, *others = (sequence(tiny, name, book) for name in ("a", "bb", "ccc"))
    slot = engine.start(first, None, 600)
    for other in others:
        engine.start(other, None, 600)
    while slot.cache.length < 400:
        engine.step()
    num_read = slot.cache.length
    engine.stop(first)
    to_the_end(engine, others)
    assert engine.counters.num_read_tokens == 599
    assert engine.counters.num_copied_tokens == num_read + 599
    [alone] = decode(new_engine(tiny), [sequence(tiny, "bb", book)])
    assert others[0].output_ids.tolist() == alone.sequence.output_ids.tolist()


def test_one_that_comes_back_with_more_gives_it_to_those_before(tiny: TargetModel) -> None:
    book, engine = text(1, 400, tiny.vocab_size), new_engine(tiny)
    [done] = decode(new_engine(tiny), [sequence(tiny, "z", book)])
    fresh, resumed = sequence(tiny, "a", book), sequence(tiny, "bb", book)
    cache = engine.new_cache(resumed.max_length)
    cache.copy_from(done.cache, 300)
    engine.start(fresh)
    engine.start(resumed, cache)
    to_the_end(engine, [fresh, resumed])
    assert engine.counters.num_read_tokens == 99


def test_a_rewound_sequence_gives_others_what_it_still_has(tiny: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.prefill.PREFILL_SECONDS", 1e-4)
    book, engine = text(1, 300, tiny.vocab_size), new_engine(tiny)
    first = sequence(tiny, "a", book, 30)
    engine.start(first, None, 256)
    while first.num_generated_tokens < 20:
        engine.step()
    engine.replace(again := first.rewound(5))
    late = sequence(tiny, "bb", book)
    engine.start(late, None, 256)
    to_the_end(engine, [again, late])
    assert engine.counters.num_read_tokens == 299
    engine.stop(late)
    assert engine.sharing.kept.num_bytes == 0  # the other has it
    engine.stop(again)
    assert engine.sharing.kept.num_bytes == 304 * tiny.cache_shape.bytes_per_position()


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@settings(max_examples=15)
@given(shapes=st.lists(st.tuples(PATHS, st.integers(1, 90)), min_size=1, max_size=6), num_at_once=st.integers(1, 4))
def test_tokens_read_are_those_of_the_prompts_trie_in_blocks_at_most(
    tiny: TargetModel, shapes: list[tuple[list[int], int]], num_at_once: int
) -> None:
    """Prompts have two blocks and own ends, in random order."""
    blocks = [text(seed, SHORTEST, tiny.vocab_size) for seed in (1, 2)]
    prompts = [
        [*(token for block in path for token in blocks[block]), *text(100 + number, length, tiny.vocab_size)]
        for number, (path, length) in enumerate(shapes)
    ]
    engine, running = new_engine(tiny), []
    for number, shared in enumerate(shared_prompts([prompt_keys(prompt) for prompt in prompts])):
        running.append(sequence(tiny, f"s{number}", prompts[number], 2))
        engine.start(running[-1], None, shared.num_tokens)
        if len(running) == num_at_once:
            to_the_end(engine, running)
            engine.stop(running.pop(0))
    to_the_end(engine, running)
    nodes = {tuple(path[:depth]) for path, _ in shapes for depth in range(1, len(path) + 1)}
    counters = engine.counters
    assert counters.num_read_tokens <= len(nodes) * SHORTEST + sum(length for _, length in shapes)
    assert counters.num_read_tokens + counters.num_copied_tokens == sum(len(prompt) - 1 for prompt in prompts)
