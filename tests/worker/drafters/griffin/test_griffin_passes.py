from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, window_start
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sampler import draw
from swiftbatch.worker.training import train_griffin as griffin_accuracy
from swiftbatch.worker.training import train_griffin as griffin_passes
from swiftbatch.worker.training.corpus import CorpusError
from swiftbatch.worker.training.feature_files import read_texts, write_texts
from swiftbatch.worker.training.feature_windows import (
    FeatureWindowSource,
    Windows,
    griffin_features,
    windows_in_use,
)
from swiftbatch.worker.training.recipes import OWN_SAMPLING, GriffinRecipe
from swiftbatch.worker.training.train_griffin import (
    NUM_FORWARDS,
    WAYS,
    accumulate_gradients,
    forward_passes,
    measure_accuracy,
    token_loss,
)
from swiftbatch.worker.training.training_texts import Text, hidden_states
from tests.worker.drafters.griffin.griffin_training_parts import (
    CPU,
    EAGLE2_RECIPE,
    FAST,
    HASS_RECIPE,
    SENTENCE,
    TEXTS,
    silent,
    text,
    untrained,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


def test_features_are_the_targets_and_are_mapped_not_copied(tiny_target: TargetModel, tmp_path: Path) -> None:
    import pyarrow as pa

    texts = [("one", Text([1, 2, 3, 4])), ("one", Text([7] * 100, 5)), ("two", Text([9, 8]))]
    path = tmp_path / "new" / "features.arrow"
    write_texts(path, texts, {"model": "m"}, tiny_target)
    before = pa.total_allocated_bytes()
    found = read_texts(path, {"model": "m"})
    assert pa.total_allocated_bytes() - before < 1000
    assert [(part.name, part.first_row) for part in found] == [("one", 0), ("one", 5), ("two", 0)]
    for part, (_, made) in zip(found, texts, strict=True):
        assert part.token_ids.tolist() == made.token_ids
        assert torch.equal(part.features, hidden_states(tiny_target, made.token_ids))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_killed_computation_of_features_leaves_no_file(tiny_target: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / "features.arrow"
    with pytest.raises(IndexError):
        write_texts(path, [("one", Text([1, 2])), ("one", Text([10**6]))], {}, tiny_target)  # no such token
    assert not list(tmp_path.iterdir())
    write_texts(path, [("one", Text([1, 2]))], {}, tiny_target)
    assert len(read_texts(path, {})) == 1


def test_features_are_reused_and_those_of_something_else_refused(
    tiny_target: TargetModel, books: Path, tmp_path: Path
) -> None:
    folder, said = tmp_path / "features", list[str]()
    first = griffin_features(tiny_target, books, folder, FAST, said.append)
    assert [len(part) for part in (first.books, first.own, first.held_out)] == [1, 4, 1 + len(OWN_SAMPLING)]
    assert {len(part.token_ids) for part in first.own} == {76}
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(times) == {"books.arrow", "own.arrow", "held-out.arrow"}
    again = griffin_features(tiny_target, books, folder, replace(FAST, seed=5, num_passes=1), said.append)
    assert torch.equal(again.own[0].features, first.own[0].features)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    for other, problem in (
        (
            replace(TEXTS, num_own_texts=5),
            "own.arrow: features of something else: num_own_texts is 4, expected 5;",
        ),
        (replace(TEXTS, num_book_tokens=99), "books.arrow: features of .* num_book_tokens is 150, expected 99; name"),
    ):
        with pytest.raises(CorpusError, match=problem):
            griffin_features(tiny_target, books, folder, replace(FAST, texts=other), silent)
    (books / "train.jsonl").write_text(json.dumps({"text": SENTENCE * 90}) + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"data is \w{12}, expected \w{12}; name another folder with --features"):
        griffin_features(tiny_target, books, folder, FAST, silent)
    (folder / "books.arrow").write_bytes(b"no arrow")
    with pytest.raises(CorpusError, match=r"books.arrow: no readable features \(.*\); delete it") as caught:
        griffin_features(tiny_target, books, folder, FAST, silent)
    assert "\n" not in str(caught.value)


# windows


def test_windows_lie_in_one_text_and_a_third_of_them_jump(tiny_target: TargetModel) -> None:
    texts = [text(tiny_target, 400), text(tiny_target, 48, seed=1)]
    recipe = replace(FAST, num_step_windows=300)
    drawn = FeatureWindowSource(texts, [], recipe).windows(0, CPU)
    num_tokens, num_jumps, num_long = 48, 0, 0
    for ids, inputs, features, num_before in zip(
        drawn.token_ids, drawn.inputs, drawn.features, drawn.num_before, strict=True
    ):
        [jump, *more] = (*(num_before[1:] == 0).nonzero()[:, 0].add(1).tolist(), num_tokens)
        assert len(more) <= 1
        source = texts[0] if any(torch.equal(f, features[0]) for f in texts[0].features) else texts[1]
        num_long += source is texts[0]
        for begin, end in ((0, jump), (jump, num_tokens)):
            if begin == end:
                continue
            at = next(i for i, f in enumerate(source.features) if torch.equal(f, features[begin]))
            assert torch.equal(source.features[at : at + end - begin], features[begin:end])
            assert torch.equal(source.token_ids[at : at + end - begin].long(), ids[begin:end])
            before = source.features[at - 1] if at else torch.zeros_like(features[0])
            assert torch.equal(inputs[begin:end], torch.cat([before[None], features[begin : end - 1]]))
            assert num_before[begin:end].tolist() == list(range(end - begin))
            assert not (begin == 0 < jump < num_tokens) or at == 0
        num_jumps += jump < num_tokens
    assert 0.2 < num_jumps / 300 < 0.4
    assert 0.8 < num_long / 300 < 0.97


def test_windows_depend_on_seed_and_step_alone_and_half_of_them_are_own_text(tiny_target: TargetModel) -> None:
    texts, own = [text(tiny_target, 200)], [text(tiny_target, 100, seed=1)]
    source = FeatureWindowSource(texts, own, FAST)
    fifth = source.windows(5, CPU)
    assert torch.equal(fifth.inputs, FeatureWindowSource(texts, own, FAST).windows(5, CPU).inputs)
    assert not torch.equal(fifth.token_ids, source.windows(6, CPU).token_ids)
    assert not torch.equal(
        fifth.token_ids, FeatureWindowSource(texts, own, replace(FAST, seed=1)).windows(5, CPU).token_ids
    )
    is_own = [any(torch.equal(row, other) for other in own[0].features) for row in fifth.features[:, -1]]
    assert is_own == [False, False, True, True]
    [share] = {len(FeatureWindowSource(texts, part, FAST).windows(0, CPU).token_ids) for part in ([], own)}
    assert share == 4


def test_in_use_every_row_is_seen_once_behind_the_sinks_and_its_window(tiny_target: TargetModel) -> None:
    whole, position = text(tiny_target, 1100), 0
    token_ids = whole.token_ids.long()
    for windows, new in windows_in_use(whole, CPU):
        length = windows.token_ids.shape[1]
        assert length <= NUM_ENTRIES
        assert windows.entries().tolist() == [list(range(length))]
        for row in range(new, length):
            start = window_start(position + 1)
            seen = torch.cat([token_ids[: min(64, position + 1)], token_ids[start : position + 1]])
            assert torch.equal(windows.token_ids[0, : row + 1], seen)
            position += 1
    assert position == 1100


# passes and loss


def stepwise(model: GriffinModel, windows: Windows, embeddings: torch.Tensor, row: int, number: int) -> torch.Tensor:
    """Run the last of `number` draft forwards with an explicit mask."""
    model.set_attention("eager")
    inputs = windows.inputs[0, : row - number + 2].float()  # of committed rows
    for end in range(row - number + 2, row + 2):
        mask = torch.full((end, end), float("-inf")).triu(1)[None, None]
        predicted, regressed = model(inputs[None], embeddings[:, :end], torch.arange(end)[None], attention_mask=mask)
        inputs = torch.cat([inputs, regressed[0, -1:]])
    return predicted[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("recipe", [FAST, replace(HASS_RECIPE, texts=TEXTS)], ids=["griffin", "hass"])
def test_a_pass_says_what_a_draft_of_that_depth_says_row_by_row(
    tiny_target: TargetModel, recipe: GriffinRecipe
) -> None:
    model, whole = untrained(tiny_target, recipe), text(tiny_target, 300)
    positions = np.concatenate([np.arange(20), np.arange(100, 120)])  # with a gap
    windows = Windows.gather([(whole, positions)], CPU)
    embeddings = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3))
    passes = forward_passes(model, embeddings, windows, 4)
    for number, output in enumerate(passes, start=1):
        without = [row for start in (0, 20) for row in range(start, start + number - 1)]
        assert output.has_draft[0].logical_not().nonzero()[:, 0].tolist() == without
        for row in {*range(number - 1, 20), *range(20 + number - 1, 40)}:
            expected = stepwise(model, windows, embeddings, row, number)
            torch.testing.assert_close(output.predicted[0, row], expected, rtol=1e-4, atol=1e-4)


def expected_loss(
    target: TargetModel, model: GriffinModel, windows: Windows, recipe: GriffinRecipe
) -> tuple[torch.Tensor, list[float], list[float]]:
    """Compute all logits at once with token-wise masks: loss, losses and shares by pass."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passes = forward_passes(
            model, target.model.get_input_embeddings()(windows.token_ids), windows, recipe.num_passes
        )
    labels = target.logits(windows.features).softmax(dim=-1).clone()
    num_windows, length = windows.token_ids.shape
    mask = torch.ones(num_windows, length, dtype=torch.bool)
    losses, shares = [], []
    for output in passes:
        logits = target.model.get_output_embeddings()(output.predicted.to(torch.bfloat16)).float()
        counted = mask & output.has_draft
        if recipe.labels == "hard":
            labels = torch.nn.functional.one_hot(windows.token_ids.roll(-1, dims=1), logits.shape[-1])
            counted = counted & ~torch.tensor([row in (9, length - 1) for row in range(length)])
        tokens = -(labels * logits.log_softmax(dim=-1)).sum(dim=-1)
        distance = (output.regressed.float() - windows.features.float()).abs().mean(dim=-1)
        losses.append((tokens + recipe.feature_weight * distance)[counted].mean())
        shares.append(float(counted.float().mean()))
        if recipe.align_top_k is not None:
            mask = torch.zeros_like(mask)
            for window in range(num_windows):
                for row in range(1, length):
                    best = logits[window, row - 1].topk(recipe.align_top_k).indices.tolist()
                    mask[window, row] = counted[window, row - 1] and int(windows.token_ids[window, row]) in best
    return torch.stack(losses).sum(), [float(loss.detach()) for loss in losses], shares


@pytest.mark.parametrize(
    "recipe",
    [
        replace(FAST, align_top_k=100),
        replace(FAST, align_top_k=None),
        EAGLE2_RECIPE,
        replace(FAST, align_top_k=100, labels="hard"),
        replace(FAST, align_top_k=100, feature_weight=0.0),
        replace(FAST, align_top_k=None, feature_weight=3.0),
    ],
    ids=["aligned", "not aligned", "eagle-2", "hard", "no features", "features"],
)
def test_the_loss_counts_aligned_rows_with_the_labels_and_the_features_weight(
    tiny_target: TargetModel, recipe: GriffinRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    picks = [(text(tiny_target, 90, seed=seed), np.r_[0:10, 40:70]) for seed in range(3)]
    windows = Windows.gather(picks, CPU)
    model, reference = untrained(tiny_target, recipe), untrained(tiny_target, recipe)
    total, losses, shares = expected_loss(tiny_target, reference, windows, recipe)
    total.backward()
    frozen = {name: parameter.clone() for name, parameter in tiny_target.model.named_parameters()}
    for num_logits in (2**21, 1):  # all at once, and row by row
        monkeypatch.setattr(griffin_passes, "NUM_LOGITS", num_logits)
        model.zero_grad()
        found, aligned = accumulate_gradients(model, tiny_target, windows, recipe)
        assert found == pytest.approx(losses, rel=0.005)
        assert aligned == pytest.approx(shares, abs=0.02)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad - expected.grad).norm() <= 0.04 * expected.grad.norm() + 1e-6
    assert recipe.align_top_k is None or 0.9 > shares[1] > 1.5 * shares[2] > 0
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in tiny_target.model.named_parameters())


@pytest.mark.parametrize("recipe", [FAST, replace(FAST, labels="hard")])
def test_shorter_texts_are_padded_with_rows_that_do_not_count(tiny_target: TargetModel, recipe: GriffinRecipe) -> None:
    short, long = text(tiny_target, 20, seed=1), text(tiny_target, 48)
    drawn = FeatureWindowSource([short], [], FAST).windows(0, CPU)
    assert drawn.token_ids.tolist() == [short.token_ids.tolist()] * 4
    picks = [(short, np.arange(20)), (long, np.arange(48))]
    both = Windows.gather(picks, CPU)
    assert both.num_before[0].tolist() == [*range(20), *[-1] * 28]
    losses, shares, gradients = [], [], []
    for windows in (both, *(Windows.gather([pick], CPU) for pick in picks)):
        model = untrained(tiny_target)
        loss, share = accumulate_gradients(model, tiny_target, windows, replace(recipe, num_passes=1))
        losses.append(loss[0])
        shares.append(share[0])
        gradients.append(model.fusion.fuse.weight.grad)
    sizes = (19, 47) if recipe.labels == "hard" else (20, 48)
    assert losses[0] == pytest.approx((sizes[0] * losses[1] + sizes[1] * losses[2]) / sum(sizes), rel=0.002)
    assert shares[0] == pytest.approx(sum(sizes) / 68, abs=1e-4)
    mean = (sizes[0] * gradients[1] + sizes[1] * gradients[2]) / sum(sizes)
    assert (gradients[0] - mean).norm() < 0.03 * mean.norm()


def test_a_token_is_aligned_when_fewer_than_top_k_others_are_better(tiny_target: TargetModel) -> None:
    windows = Windows.gather([(text(tiny_target, 60), np.arange(60))], CPU)
    model, everywhere = untrained(tiny_target), torch.ones(1, 60, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = tiny_target.model.get_input_embeddings()(windows.token_ids)
        [output] = forward_passes(model, embeddings, windows, 1)
    _, _, ranks = token_loss(tiny_target, output.predicted, windows, everywhere)
    top_k = int(ranks[0, :-1].median())  # a rank that occurs, so that one more token would change the count
    _, [_, share] = accumulate_gradients(model, tiny_target, windows, replace(FAST, num_passes=2, align_top_k=top_k))
    assert share == round(float((ranks[0, :-1] < top_k).sum()) / 60, 4)


def test_no_aligned_row_is_no_loss(tiny_target: TargetModel) -> None:
    windows = Windows.gather([(text(tiny_target, 60), np.arange(2))], CPU)  # too short for a third pass
    losses, aligned = accumulate_gradients(untrained(tiny_target), tiny_target, windows, FAST)
    assert (losses[2], aligned[2]) == (0.0, 0.0)


# accuracy


@torch.no_grad()
def test_accuracy_counts_the_same_draws_and_misaligned_rates_only_drafts_that_got_there(
    tiny_target: TargetModel,
) -> None:
    model, whole = untrained(tiny_target), text(tiny_target, 90, first_row=20, seed=3)
    [(windows, _)] = windows_in_use(whole, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passes = forward_passes(
            model, tiny_target.model.get_input_embeddings()(windows.token_ids), windows, NUM_FORWARDS
        )
    said = tiny_target.logits(whole.features)
    drafted = [tiny_target.logits(output.predicted[0].to(torch.bfloat16)) for output in passes]
    [record] = measure_accuracy("after", 7, tiny_target, model, [whole])
    assert (record.when, record.step, record.texts, record.num_rows) == ("after", 7, "books", 70)
    noise = GumbelNoise(0, tiny_target.vocab_size)
    for way, temperature in zip(WAYS, (0.0, 1.0), strict=True):
        params = SamplingParams(max_tokens=1, temperature=temperature)
        same = np.array(
            [[draw(logits[row], row + 1, params, noise) == draw(said[row], row + 1, params, noise) for row in range(90)]
             for logits in drafted]
        )  # fmt: skip
        assert record.same[way] == pytest.approx(same[:, 20:].mean(axis=1), abs=0.001)
        for forward in range(NUM_FORWARDS):
            reached = [row for row in range(20, 90) if all(same[i, row - forward + i] for i in range(forward))]
            wrong = sum(not same[forward, row] for row in reached) / max(1, len(reached))
            assert record.misaligned[way][forward] == pytest.approx(wrong, abs=0.001)


@torch.no_grad()
def test_accuracy_of_a_long_text_counts_each_row_once_whatever_the_chunks(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untrained(tiny_target)
    texts = [
        text(tiny_target, 600, name="long"),
        text(tiny_target, 40, 10, name="short"),
        text(tiny_target, 40, 10, 1, "short"),
    ]
    found = list(measure_accuracy("before", 0, tiny_target, model, texts))
    assert [(record.texts, record.num_rows) for record in found] == [("long", 600 - NUM_FORWARDS + 1), ("short", 60)]
    monkeypatch.setattr(griffin_accuracy, "NUM_LOGITS", 7 * tiny_target.vocab_size)
    for one, other in zip(found, measure_accuracy("before", 0, tiny_target, model, texts), strict=True):
        assert other.same["T 1"] == pytest.approx(one.same["T 1"], abs=0.005)


# training
