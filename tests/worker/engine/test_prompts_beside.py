"""Prompts are read beside decoding, some tokens a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.worker.engine.prefill import ROWS_BESIDE
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.forward_interface import MOST_READ
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_capacity import NUM_STEPS
from tests.worker.engine.prefix_parts import decode, new_engine, rows_of, sequence, text, to_the_end
from tests.worker.model.kind_parts import native_target, tiny_target


@pytest.mark.parametrize("engine_name", ["autoregressive", "token-recycling", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_and_keys_and_values_are_those_of_a_job_alone(
    embedded_targets: dict[str, TargetModel], dtype: str, engine_name: str
) -> None:
    target, lengths = embedded_targets[dtype], (5, 300, 70, 200)
    prompts = [text(seed, length, target.vocab_size) for seed, length in enumerate(lengths)]
    alone = [
        decode(new_engine(target), [sequence(target, "x" * (1 + i), each, 20)])[0] for i, each in enumerate(prompts)
    ]
    engine = new_engine(target, engine_name)
    slots = decode(engine, [sequence(target, "x" * (1 + i), each, 20) for i, each in enumerate(prompts)])
    assert [slot.sequence.output_ids.tolist() for slot in slots] == [
        each.sequence.output_ids.tolist() for each in alone
    ]
    assert [rows_of(slot) for slot in slots] == [rows_of(slot) for slot in alone]
    assert engine.counters.num_read_tokens == sum(lengths) - len(lengths)


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss", "mistral"])
def test_states_experts_and_windows_change_nothing(kind: str) -> None:
    target = tiny_target(kind)
    prompt, short = text(1, 150, target.vocab_size), text(2, 5, target.vocab_size)
    [alone] = decode(new_engine(target), [sequence(target, "xx", prompt)])
    _, beside = decode(new_engine(target), [sequence(target, "x", short), sequence(target, "xx", prompt)])
    assert beside.sequence.output_ids.tolist() == alone.sequence.output_ids.tolist()
    assert rows_of(beside) == rows_of(alone)


def test_kernels_of_recurrent_layers_get_as_many_rows_as_they_take(tmp_path: Path) -> None:
    target = native_target("qwen3_next", tmp_path)
    engine, first = new_engine(target), sequence(target, "first", text(1, 5, target.vocab_size), 40)
    engine.start(first)
    engine.step()
    prompts = [text(seed, 300, target.vocab_size) for seed in range(4)]
    slots = [engine.start(sequence(target, "x" * i, each)) for i, each in enumerate(prompts)]
    for slot in slots:
        assert slot.cache.layer_states is not None
        slot.cache.layer_states.reserve(NUM_STEPS)
    to_the_end(engine, [slot.sequence for slot in slots])
    [alone] = decode(new_engine(target), [sequence(target, "", prompts[0])])
    assert slots[0].sequence.output_ids.tolist() == alone.sequence.output_ids.tolist()


@pytest.mark.parametrize("num_waiting", [1, 2, 6])
def test_a_job_that_decodes_gets_a_token_each_step_and_waits_for_few_rows(
    embedded_targets: dict[str, TargetModel], num_waiting: int
) -> None:
    target = embedded_targets["float32"]
    engine, first = new_engine(target), sequence(target, "first", text(1, 5, target.vocab_size), 200)
    engine.start(first)
    engine.step()
    waiting = [
        engine.start(sequence(target, "x" * i, text(i, 400, target.vocab_size))) for i in range(1, num_waiting + 1)
    ]
    while any(slot.num_to_prefill for slot in waiting):
        num_tokens, num_read = first.num_generated_tokens, engine.counters.num_read_tokens
        num_unread = sum(slot.num_to_prefill > 0 for slot in waiting)
        engine.step()
        assert first.num_generated_tokens == num_tokens + 1
        assert 0 < engine.counters.num_read_tokens - num_read <= min(MOST_READ, ROWS_BESIDE * num_unread)


def test_prompts_do_not_count_as_time_of_a_step(embedded_targets: dict[str, TargetModel]) -> None:
    target = embedded_targets["float32"]
    engine, first = new_engine(target), sequence(target, "first", text(1, 300, target.vocab_size), 200)
    engine.start(first)  # read alone, so that the time of its tokens is known
    engine.step()
    engine.start(sequence(target, "x", text(2, 300, target.vocab_size)))
    before = step_costs.seconds_now()
    passed = step_costs._num_passed_over[0]
    engine.step()
    assert step_costs._num_passed_over[0] > passed
    assert step_costs.seconds_now() > before  # less than the step took was passed over
    to_the_end(engine, [first])
