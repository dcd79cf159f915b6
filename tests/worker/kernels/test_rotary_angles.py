"""Rotary frequencies equal transformers'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.kernels.rope_scaling import default_frequencies, rotary_of
from swiftbatch.worker.kernels.transformers_weights import decoder_weights

LLAMA31: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
STRETCHES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (LLAMA31, 128),
    "Llama 3.2 1B": (LLAMA31 | {"factor": 32.0}, 64),
    "whole numbers": (LLAMA31 | {"factor": 8, "rope_theta": 500000, "low_freq_factor": 1, "high_freq_factor": 4}, 128),
    "numbers that are no powers of two": (
        LLAMA31 | {"factor": 7.3, "low_freq_factor": 0.9, "high_freq_factor": 3.7, "rope_theta": 1e6},
        80,
    ),
    "a short original": (LLAMA31 | {"original_max_position_embeddings": 64, "rope_theta": 10000.0}, 64),
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3 above 40,960 positions": (YARN, 128),
    "Kimi K2": (YARN | {"factor": 32.0, "beta_slow": 1.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 64),
    "a factor of its own": (YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}, 96),
    "two scales": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}, 64),
    "a factor below 1": (YARN | {"factor": 0.5}, 64),
    "gpt-oss": (YARN | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}, 64),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, 128),
}
MALFORMED: dict[str, dict[str, Any]] = {
    "no factor": {"factor": None},
    "a factor of 0": {"factor": 0},
    "a factor of True": {"factor": True},
    "a factor below 0": {"factor": -8.0},
    "words": {"low_freq_factor": "1.0"},
    "a list": {"high_freq_factor": [4.0]},
    "nothing between the two": {"high_freq_factor": 1.0},
    "no positions": {"original_max_position_embeddings": 0},
    "endless positions": {"original_max_position_embeddings": math.inf},
    "more than a float holds": {"original_max_position_embeddings": 10**400},
    "not a number": {"rope_theta": math.nan},
}


def config_of(parameters: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(parameters),
    )  # fmt: skip


def of_transformers(parameters: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    frequencies, scaling = ROPE_INIT_FUNCTIONS["llama3"](config_of(parameters, head_dim))
    assert scaling == 1.0
    found: NDArray[np.float32] = frequencies.numpy()
    return found


@pytest.mark.parametrize("stretch", STRETCHES)
def test_llama3_frequencies_are_those_of_transformers(stretch: str) -> None:
    """At most one unit in the last place, by which processors' powers differ."""
    ours, theirs = rotary_of(*STRETCHES[stretch]).frequencies, of_transformers(*STRETCHES[stretch])
    assert ours.dtype == theirs.dtype == np.float32
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_rotations_are_those_of_transformers_to_a_unit_in_the_last_place(name: str) -> None:
    parameters, head_dim = OTHERS[name]
    frequencies, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config_of(parameters, head_dim))
    ours, theirs = rotary_of(parameters, head_dim, is_strict=True), frequencies.numpy()
    assert np.abs(ours.frequencies.view(np.int32) - theirs.view(np.int32)).max() <= 2
    assert ours.scaling == scaling
    assert ours.numerics


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + each / 40 for each in range(48)],
    "long_factor": [1.0 + each * each / 30 for each in range(48)],
}


@pytest.mark.parametrize("change", [{}, {"factor": 1.0}, {"factor": 0.5}, {"attention_factor": 1.4}])
def test_both_rotations_of_longrope_are_those_of_transformers(change: dict[str, Any]) -> None:
    parameters = LONGROPE | change
    ours, config = rotary_of(parameters, 96, is_strict=True), config_of(parameters, 96)
    for found, length in ((ours.frequencies, 4096), (ours.long_frequencies, 4097)):
        theirs, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        assert found is not None
        assert np.abs(found.view(np.int32) - theirs.numpy().view(np.int32)).max() <= 2
        assert ours.scaling == scaling


def test_rows_of_long_jobs_stand_behind_those_of_short_ones() -> None:
    rotary = rotary_of(LONGROPE, 96)
    assert [rotary.num_rows(length) for length in (1, 4096, 4097, 9000)] == [1, 4096, 4096 + 4097, 4096 + 9000]
    assert rotary.long_frequencies is not None
    turns = rotary.turns(np.array([0, 4095, 4096, 4097, 5000]))
    expected = [0 * rotary.frequencies, np.float32(4095) * rotary.frequencies]
    expected += [np.float32(position) * rotary.long_frequencies for position in (0, 1, 904)]
    assert np.array_equal(turns, np.stack(expected))
    assert rotary_of({"rope_type": "default", "rope_theta": 1e4}, 96).num_rows(9000) == 9000


@pytest.mark.parametrize(
    "other", [{"truncate": "no"}, {"beta_fast": "32"}, {"attention_factor": 0}, {"type": "linear"}]
)
def test_forms_that_only_transformers_takes_are_left_to_it(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="found"):
        rotary_of(YARN | other, 64)


def test_the_older_word_for_a_type_is_taken() -> None:
    older = {("type" if name == "rope_type" else name): value for name, value in YARN.items()}
    assert (rotary_of(older, 64).frequencies == rotary_of(YARN, 64).frequencies).all()


@pytest.mark.parametrize("stretch", STRETCHES)
def test_long_waves_are_stretched_short_ones_stay_and_others_are_blended(stretch: str) -> None:
    parameters, head_dim = STRETCHES[stretch]
    plain = default_frequencies(parameters["rope_theta"], head_dim).astype(np.float64)
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high, factor = (parameters[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    share = np.clip((turns - low) / (high - low), 0, 1)
    assert 0 < ((share > 0) & (share < 1)).sum() < len(share)
    expected = plain * ((1 - share) / factor + share)
    assert np.abs(rotary_of(parameters, head_dim).frequencies / expected - 1).max() < 1e-6


@pytest.mark.parametrize("stretch", STRETCHES)
def test_a_loaded_model_has_the_very_same(stretch: str) -> None:
    parameters, head_dim = STRETCHES[stretch]
    weights = decoder_weights(LlamaForCausalLM(config_of(parameters, head_dim)))
    assert weights is not None
    assert (weights.rotary.frequencies == rotary_of(parameters, head_dim).frequencies).all()
    assert weights.rotary.scaling == 1.0


@pytest.mark.parametrize("fault", MALFORMED)
def test_numbers_that_make_no_sense_are_refused(fault: str) -> None:
    parameters = {name: value for name, value in (LLAMA31 | MALFORMED[fault]).items() if value is not None}
    with pytest.raises((KeyError, ValueError)):
        rotary_of(parameters, 64)


@pytest.mark.parametrize("high", [1.0, 0.5])
def test_what_transformers_alone_takes_is_left_as_it_has_it(high: float) -> None:
    model = LlamaForCausalLM(config_of(LLAMA31 | {"high_freq_factor": high}, 64))
    weights = decoder_weights(model)
    assert weights is not None
    assert np.array_equal(weights.rotary.frequencies, model.model.rotary_emb.inv_freq.numpy())


def test_a_model_that_spins_without_end_is_left_to_transformers() -> None:
    assert decoder_weights(LlamaForCausalLM(config_of(LLAMA31 | {"factor": 0.0}, 64))) is None


def test_rotations_that_earlier_versions_rounded_otherwise_have_numerics_of_their_own() -> None:
    """Their jobs do not resume with old caches."""
    variant = chosen_variant()
    if variant is None:
        pytest.skip("no kernels run here")
    names = {}
    for name in ("linear", "Qwen3 above 40,960 positions"):
        weights = decoder_weights(LlamaForCausalLM(config_of(*OTHERS[name])).requires_grad_(False))
        assert weights is not None
        names[name] = NativeForwards(weights, frozenset(), variant).numerics
    plain = decoder_weights(LlamaForCausalLM(config_of(LLAMA31, 128)).requires_grad_(False))
    assert plain is not None
    assert len({NativeForwards(plain, frozenset(), variant).numerics, *names.values()}) == 3
