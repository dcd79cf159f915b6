from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.scheduler.commands.train import _griffin_recipe, griffin
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, load_griffin
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import GRIFFIN_FILE
from swiftbatch.worker.training import train_griffin as training
from swiftbatch.worker.training import training_loop
from swiftbatch.worker.training.corpus import CorpusError
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, OWN_SAMPLING, GriffinRecipe
from swiftbatch.worker.training.train_griffin import FILES, WAYS, train_griffin
from tests.worker.drafters.griffin.griffin_training_parts import (
    EAGLE2_RECIPE,
    FAST,
    HASS_RECIPE,
    SENTENCE,
    TEXTS,
    command,
    records,
    weights,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


def train(
    model: Path, books: Path, output: Path, recipe: GriffinRecipe = FAST, features: Path | None = None
) -> list[str]:
    said: list[str] = []
    train_griffin(str(model), books, output, recipe, said.append, features)
    return said


def test_the_command_writes_weights_log_and_plot_and_does_nothing_again(
    tiny_model: Path, tiny_target: TargetModel, books: Path, tmp_path: Path
) -> None:
    (books / "train.jsonl").write_text(json.dumps({"text": SENTENCE * 200}) + "\n", encoding="utf-8")
    output, options = tmp_path / "griffin", ["--own-texts", "0", "--features", str(tmp_path / "shared")]
    (books / "test.jsonl").unlink()
    result = command(tiny_model, books, output, *options)
    assert result.exit_code == 0, result.output
    assert "no *test*.jsonl; the accuracy is not measured" in result.output
    assert {path.name for path in output.iterdir()} == {GRIFFIN_FILE, FILES.log, FILES.plot}
    assert (output / FILES.plot).read_bytes().startswith(b"\x89PNG")
    model = load_griffin(output, tiny_target)
    assert model.config == replace(GriffinConfig.for_target(tiny_target.model.config), fusion="token")
    first, *steps = records(output)
    assert first["model"] == tiny_target.files.fingerprint
    assert first["recipe"]["num_steps"] == 2
    assert [step["step"] for step in steps] == [1, 2]
    assert [[len(step[key]) for step in steps] for key in ("losses", "aligned")] == [[1, 1], [1, 1]]
    times = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    again = command(tiny_model, books, output, *options)
    assert "holds this training, finished; nothing to do" in again.output
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times
    for option, value, difference in (
        ("--passes", "2", "num_passes is 3, expected 2"),
        ("--labels", "hard", "labels is soft, expected hard"),
        ("--feature-weight", "0", "feature_weight is 0.1, expected 0.0"),
        ("--warmup", "2000", "num_warmup_steps is 50, expected 2000"),
        ("--rows", "100", "window_length is 576, expected 100"),
        ("--samples", "8", "num_step_windows is 4, expected 8"),
    ):
        other = command(tiny_model, books, output, *options, option, value)
        assert other.exit_code == 2
        assert f"holds another training: recipe.{difference}; name another folder, or delete" in other.output
    (output / FILES.log).unlink()
    unknown = command(tiny_model, books, output, *options)
    assert f"no {FILES.log} tells how its {FILES.product} was trained" in unknown.output


@pytest.mark.slow
def test_training_makes_drafts_better_at_every_depth(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    recipe = replace(FAST, num_steps=35, base_learning_rate=1e-5, texts=replace(TEXTS, num_own_texts=0))
    said = train(tiny_model, books, tmp_path / "griffin", recipe)
    log = records(tmp_path / "griffin")
    losses = [record["losses"][0] for record in log if "losses" in record]
    assert losses[-1] < losses[0] - 0.3
    before, after = ({r["texts"]: r["same"] for r in log if r.get("when") == when} for when in ("before", "after"))
    assert set(before) == set(after) == {"test books", *(f"own text, {name}" for name in OWN_SAMPLING)}
    for way in WAYS:
        gains = np.subtract(after["test books"][way], before["test books"][way])
        assert min(gains[:3]) > 0.1
    assert any(line.startswith("after training, test books: the target's token by forward ") for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [5, 6])
def test_a_killed_training_goes_on_to_the_same_bits_and_logs_each_step_once(
    tiny_model: Path, books: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int
) -> None:
    (books / "test.jsonl").unlink()
    monkeypatch.setattr(training_loop, "NUM_STATE_STEPS", 3)
    train(tiny_model, books, tmp_path / "whole", features=shared)
    num_done, original = 0, training.accumulate_gradients

    def stopping(*args: object) -> object:
        nonlocal num_done
        num_done += 1
        if num_done > stopped_at:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "accumulate_gradients", stopping)
    if stopped_at == FAST.num_steps:
        monkeypatch.setattr(training, "save_griffin", lambda *args: stopping())  # killed after the last step
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, books, tmp_path / "killed", features=shared)
    monkeypatch.undo()
    assert not (tmp_path / "killed" / GRIFFIN_FILE).exists()
    with (tmp_path / "killed" / FILES.log).open("a", encoding="utf-8") as log:
        log.write('{"step": 6, "los')
    monkeypatch.setattr(training_loop, "NUM_STATE_STEPS", 3)
    with pytest.raises(ModelError, match=r"recipe\.seed is 0, expected 1"):
        train(tiny_model, books, tmp_path / "killed", replace(FAST, seed=1), shared)
    said = train(tiny_model, books, tmp_path / "killed", features=shared)
    assert f"{stopped_at // 3 * 3} of 6 steps behind it" in said[-1]
    whole, killed = (weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    logs = [[(r.get("step"), r.get("losses")) for r in records(tmp_path / name)] for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    assert not (tmp_path / "killed" / FILES.state).exists()


@pytest.mark.slow
def test_the_seed_and_the_mask_count(tiny_model: Path, books: Path, shared: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    recipes = {
        "one": FAST,
        "seed": replace(FAST, seed=1),
        "mask": replace(FAST, align_top_k=None),
    }
    for name, recipe in recipes.items():
        train(tiny_model, books, tmp_path / name, replace(recipe, num_steps=2), shared)
    assert len({weights(tmp_path / name)["fusion.fuse.weight"].float().sum().item() for name in recipes}) == 3


def test_a_damaged_state_is_one_line(tiny_model: Path, books: Path, shared: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    output = tmp_path / "griffin"
    train(tiny_model, books, output, replace(FAST, num_steps=1), shared)
    (output / FILES.state).write_bytes(b"no state")
    with pytest.raises(ModelError, match=r"griffin_state.pt: cannot be read \(.*\); delete it") as caught:
        train(tiny_model, books, output, replace(FAST, num_steps=1), shared)
    assert "\n" not in str(caught.value)


def test_switches_are_the_recipes_that_griffin_is_compared_with() -> None:
    def recipe(**changes: object) -> GriffinRecipe:
        left_out = {"model", "data", "output", "features"}
        defaults = griffin.make_context("griffin", ["--data", "books", "--output", "griffin"]).params
        options = {name: value for name, value in defaults.items() if name not in left_out}
        return _griffin_recipe(**(options | changes))

    without = {"no_token_guided_fusion": True, "no_token_enhanced_head": True}
    assert recipe() == GRIFFIN_RECIPE
    assert recipe(**without, no_token_alignment=True) == EAGLE2_RECIPE
    assert recipe(**without, align_top_k=0) == HASS_RECIPE
    assert recipe(num_passes=5, align_top_k=1) == replace(GRIFFIN_RECIPE, num_passes=5, align_top_k=1)


def test_the_learning_rate_warms_up_and_falls_and_is_larger_for_small_models() -> None:
    recipe = replace(GRIFFIN_RECIPE, num_steps=100, num_warmup_steps=10)
    rates = [recipe.learning_rate(step, 4096) for step in range(100)]
    assert max(rates) == rates[10] == 3e-5
    assert rates[:10] == pytest.approx([3e-6 * (step + 1) for step in range(10)])
    assert rates[99] == pytest.approx(3e-5 / 90)
    assert recipe.learning_rate(10, 256) == pytest.approx(3e-5 * 128)


def test_passes_come_in_one_after_the_other_behind_a_share_of_the_steps() -> None:
    recipe = replace(GRIFFIN_RECIPE, num_steps=10, single_pass_share=0.6)
    assert [recipe.at(step).num_passes for step in range(10)] == [1, 1, 1, 1, 1, 1, 2, 2, 3, 3]
    assert {replace(recipe, num_passes=1).at(step).num_passes for step in range(10)} == {1}
    assert replace(recipe.at(9), num_passes=3) == recipe


def test_bad_data_and_options_are_one_line(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    empty, output = tmp_path / "empty", tmp_path / "griffin"
    empty.mkdir()
    for data, options, problem in (
        (empty, [], "no file matches *train*.jsonl"),
        (books, ["--no-token-alignment", "--passes", "3"], "leave out --passes and --top-k"),
        (books, ["--passes", "0"], "--passes"),
        (books, ["--labels", "sotf"], "'sotf' is not one of 'soft', 'hard'"),
        (books, ["--feature-weight", "nan"], "found nan, expected at most 1,000 times"),
        (books, ["--rows", "4097"], "4097 is not in the range 2<=x<=4096"),
    ):
        result = command(tiny_model, data, output, *options)
        assert result.exit_code == 2
        assert problem in result.output
        assert len(result.output.strip().splitlines()) == 1
    (empty / "train.jsonl").write_text(json.dumps({"text": SENTENCE}) + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"too short, the longest has \d+ tokens; expected 64 or more"):
        train(tiny_model, empty, output, GRIFFIN_RECIPE)
    with pytest.raises(
        CorpusError, match="own texts of 21 tokens, prompt included, are too short; expected 48 or more"
    ):
        train(tiny_model, books, output, replace(FAST, texts=replace(TEXTS, num_own_tokens=5)))
    assert not (output / GRIFFIN_FILE).exists()
