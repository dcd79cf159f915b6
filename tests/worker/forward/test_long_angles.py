"""A job's own length chooses longrope angles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.engine.prefill import SHORTEST
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward import target_model
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.rope_cos_sin import angles
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.model_files import ModelFiles, what_refuses
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence as Job
from tests.worker.engine.prefix_parts import decode, new_engine, rows_of, sequence
from tests.worker.kv.cache_parts import everything_of
from tests.worker.model.dense_configs import PUBLISHED
from tests.worker.model.expert_configs import WITH_EXPERTS
from tests.worker.model.folders import saved_as
from tests.worker.model.long_angles import LONG_ANGLES, MOST_POSITIONS, PHI4_MINI, SHORT_LENGTH, text

SHORT_JOB, LONG_JOB = SHORT_LENGTH, SHORT_LENGTH + 1
ROUNDING = 3e-4  # share of the greatest logit, in float32


@pytest.fixture(scope="module", params=LONG_ANGLES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return saved_as(LONG_ANGLES[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(saved_as(PHI4_MINI, tmp_path_factory.mktemp("phi")), "float32", "cpu")


def read(target: TargetModel, max_length: int, token_ids: Sequence[int]) -> tuple[torch.Tensor, FullKVCache]:
    """Return the logits of all tokens of a job of at most `max_length`, and its cache."""
    cache, logits = target.new_cache(max_length), []
    while cache.length < len(token_ids):
        logits.append(target.logits(target.read(cache, list(token_ids[cache.length :]))))
    return torch.cat(logits), cache


def of_transformers(files: ModelFiles, token_ids: Sequence[int]) -> torch.Tensor:
    """Run one forward over all tokens, whose number chooses the factors."""
    model = load_causal_lm(files, torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < ROUNDING * expected.abs().max())


def test_short_and_long_jobs_of_published_models_say_what_transformers_says_of_as_long_a_text(
    files: ModelFiles,
) -> None:
    target = TargetModel.load(files, "float32", "cpu")
    assert isinstance(target.forwards, NativeForwards)
    short, long = of_transformers(files, text(SHORT_LENGTH)), of_transformers(files, text(3 * SHORT_LENGTH))
    assert is_near(read(target, SHORT_JOB, text(SHORT_LENGTH))[0], short)
    assert is_near(read(target, 3 * SHORT_LENGTH, text(3 * SHORT_LENGTH))[0], long)
    early = read(target, LONG_JOB, text(3 * SHORT_LENGTH)[:20])[0]
    assert is_near(early, long[:20])
    assert not is_near(early, short[:20])


def test_a_published_model_is_taken_and_shown_as_one_of_the_kernels(files: ModelFiles) -> None:
    found = inspect_model(str(files.path))
    assert found.refusal is None
    assert [path.name for path in (found.cpu, found.cuda) if path is not None] == ["kernels", "kernels"]


def test_doctor_s_comparison_agrees(phi: TargetModel) -> None:
    assert compare(phi, 90).agrees


def test_rows_of_short_and_long_jobs_in_one_forward_have_the_bits_that_they_have_alone(phi: TargetModel) -> None:
    tree, tokens = DraftTree.chain([7, 8, 9]), text(70)

    def rows(max_length: int) -> Any:
        return tree_rows(read(phi, max_length, tokens)[1], 5, tree)

    alone = [phi.verify([rows(length)])[0].logits for length in (SHORT_JOB, LONG_JOB)]
    together = phi.verify([rows(SHORT_JOB), rows(LONG_JOB)])
    for mine, its in zip(together, alone, strict=True):
        assert torch.equal(mine.logits, its)
    assert not torch.equal(*alone)


@pytest.mark.parametrize("max_length", [SHORT_JOB, LONG_JOB, 4 * SHORT_LENGTH])
def test_rows_behind_a_partial_cache_have_the_angles_of_their_job(phi: TargetModel, max_length: int) -> None:
    _, full = read(phi, max_length, text(100))
    partial = everything_of(phi.cache_shape, full)
    tree = DraftTree.chain([4, 5])
    [checked] = phi.check([partial_rows(partial, 6, full.length, tree)])
    [exact] = phi.verify([tree_rows(full, 6, tree)])
    assert is_near(checked.logits, exact.logits)


def jobs(target: TargetModel, num_tokens: int) -> list[Job]:
    return [sequence(target, name, text(60, seed), num_tokens) for seed, name in enumerate(("a", "bb"))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["auto", "token-recycling", "suffix"])
@pytest.mark.parametrize("num_tokens", [40, SHORT_LENGTH])
def test_engines_and_resumes_give_plain_decoding_s_tokens_on_both_sides_of_the_bound(
    phi: TargetModel, engine: str, num_tokens: int
) -> None:
    plain = [decode(new_engine(phi), [job])[0].sequence.output_ids.tolist() for job in jobs(phi, num_tokens)]
    fresh, resumed = jobs(phi, num_tokens)
    resumed.extend(np.array(plain[1][:17]))
    found = decode(new_engine(phi, engine), [fresh, resumed])
    assert [slot.sequence.output_ids.tolist() for slot in found] == plain


def test_a_beginning_is_shared_among_jobs_of_one_side_alone(phi: TargetModel) -> None:
    prompt = text(SHORTEST + 11)
    lengths = {"a": 8, "bb": 8, "ccc": SHORT_LENGTH, "dddd": SHORT_LENGTH + 5}
    made = [sequence(phi, name, prompt, num_tokens) for name, num_tokens in lengths.items()]
    alone = [decode(new_engine(phi), [sequence(phi, name, prompt, n)])[0] for name, n in lengths.items()]
    engine = new_engine(phi)
    slots = decode(engine, made)
    assert engine.counters.num_copied_tokens == 2 * (len(prompt) - 1)
    assert [rows_of(slot) for slot in slots] == [rows_of(slot) for slot in alone]
    assert [slot.sequence.output_ids.tolist() for slot in slots] == [s.sequence.output_ids.tolist() for s in alone]


def test_a_beginning_that_was_kept_is_for_jobs_of_the_same_side(phi: TargetModel) -> None:
    prompt, engine = text(SHORTEST + 11), new_engine(phi)

    def run(name: str, num_tokens: int) -> int:
        before = engine.counters.num_copied_tokens
        decode(engine, [sequence(phi, name, prompt, num_tokens)], len(prompt) - 1)
        return engine.counters.num_copied_tokens - before

    most = len(prompt) - 1
    assert [run("a", 8), run("bb", 90), run("ccc", 90), run("dddd", 8)] == [0, 0, most, most]


def test_a_cache_outside_the_device_has_the_angles_of_its_job(phi: TargetModel, tmp_path: Path) -> None:
    offloaded = TargetModel(phi.forwards, phi.files, str(tmp_path))
    for length in (SHORT_JOB, LONG_JOB):
        assert torch.equal(read(offloaded, length, text(90))[0], read(phi, length, text(90))[0])


ANGLES = PHI4_MINI["rope_scaling"]
ORIGINAL = "original_max_position_embeddings"
PHI_MOE = next(config for config in WITH_EXPERTS.values() if config["model_type"] == "phimoe")
MOE_ANGLES = PHI_MOE["rope_scaling"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "xielu"}, "these do not run it: its hidden_act is 'xielu'"),
        ({"rope_scaling": ANGLES | {"short_mscale": 1.2}}, "other angles"),
        ({"rope_scaling": ANGLES | {"long_factor": [1.0] * 47}}, "found 47 factors of its frequencies"),
        ({"rope_scaling": {"type": "longrope"}}, "found short_factor None, expected a list"),
        ({ORIGINAL: 1}, f"found {ORIGINAL} 1, expected a whole number above 1"),
        (PUBLISHED["Llama 3.2 1B"] | {"rope_scaling": ANGLES}, "its kind was not tried with longrope"),
        (PHI_MOE | {"rope_scaling": MOE_ANGLES | {"long_mscale": 1.5}}, "its short_mscale and long_mscale are 1.24"),
        (PHI_MOE | {"rope_scaling": MOE_ANGLES | {"long_mscale": None}}, "its long_mscale is None"),
    ],
)
def test_longrope_that_the_kernels_do_not_run_is_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    assert what_refuses(PHI4_MINI, Path("nowhere")) is None
    refusal = what_refuses(change if "architectures" in change else PHI4_MINI | change, Path("nowhere"))
    assert refusal is not None
    assert "its rotary positions (longrope) change with the length of the text" in refusal
    assert words in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": ANGLES | {"long_factor": [0.0] * 48}}, "expected a list, each a finite number above 0"),
        ({"rope_scaling": ANGLES | {"long_factor": None}}, "rope_scaling.long_factor = None; expected a list, each"),
        ({ORIGINAL: 0}, f"{ORIGINAL} = 0; expected a positive integer"),
        ({ORIGINAL: 99.5}, f"{ORIGINAL} = 99.5; expected a positive integer"),
    ],
)
def test_numbers_of_longrope_that_nothing_turns_by_are_told(change: dict[str, Any], words: str) -> None:
    refusal = what_refuses(PHI4_MINI | change, Path("nowhere"))
    assert refusal is not None
    assert words in refusal
    assert "\n" not in refusal


def test_where_our_kernels_do_not_run_such_a_model_is_refused_when_it_is_loaded(
    phi: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_model, "chosen_variant", lambda: None)
    with pytest.raises(ModelError, match=re.escape("(longrope) change with the length of the text")):
        TargetModel.load(phi.files, "float32", "cpu")


def test_what_does_not_turn_is_not_scaled(phi: TargetModel) -> None:
    """A quarter of each head is not rotated in Phi-4-mini; transformers scales the other pairs."""
    rotary = read_decoder_config(PHI4_MINI).rotary
    assert rotary.scaling == pytest.approx((1 + np.log(MOST_POSITIONS / SHORT_LENGTH) / np.log(SHORT_LENGTH)) ** 0.5)
    table = angles(rotary, np.array([0, SHORT_LENGTH]), torch.float32)
    assert table[:, :48].allclose(torch.tensor(rotary.scaling, dtype=torch.float32))
    assert torch.equal(table[:, 48:64], torch.ones(2, 16))
    assert torch.equal(table[:, 64:], torch.zeros(2, 64))
