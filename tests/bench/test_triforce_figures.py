"""The figures of attention and of the draft model are what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.independent_sequences import joined
from bench.prompt_arms import Prompt, PromptArms, read_prompt
from bench.triforce_ablation import PromptArm, new_drafter
from bench.triforce_figures import Measured, attention, bottlenecks, divergences, locality, needles, recovered
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.drafters.drafter_parts import free_rows

pytestmark = pytest.mark.usefixtures("one_thread")

PREFILL, NUM_TOKENS, BUDGET = 1200, 12, 300


@pytest.fixture(scope="module")
def on(tiny_model: Path) -> Measured:
    target = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")
    ids = torch.randint(3, target.vocab_size, (PREFILL + NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return Measured(target, ids.tolist(), PREFILL, NUM_TOKENS, BUDGET, 5, None)


def test_divergence_is_the_probability_that_differs(on: Measured) -> None:
    found = list(divergences(on))
    lengths = [75, 150, 300, 600, 1200]
    assert [(each["length"], each["draft"]) for each in found] == [
        (length, draft) for length in lengths for draft in ("StreamingLLM", "sliding window")
    ]
    for record in found:
        assert 0 < record["T = 1"] < 1
    for streaming, window in zip(found[::2], found[1::2], strict=True):
        is_same = streaming["T = 1"] == pytest.approx(window["T = 1"], abs=1e-6)
        assert is_same == (streaming["length"] < 512)  # then the draft model reads the whole text both ways


def test_a_draft_model_that_is_the_target_does_not_diverge(on: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.triforce_figures.DraftModel.load", lambda *_: TargetAsDraft(on.target))
    for record in divergences(on):
        assert record["T = 0.2"] == pytest.approx(0, abs=1e-4)


class TargetAsDraft:
    """Reads the whole text whatever it is asked for, as long as this begins the text."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def start(self, sequence_id: str) -> None: ...

    def stop(self, sequence_id: str) -> None: ...

    def window_of(self, token_ids: torch.Tensor, num_committed: int) -> torch.Tensor:
        return token_ids

    def logits(self, requests: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        [ids] = requests.values()
        read = read_prompt(self._target, Prompt(ids.tolist(), []), 1)
        [outputs] = self._target.verify([tree_rows(read.cache, int(ids[-1]), DraftTree())])
        return [outputs.logits[0].clone()]


def test_attention_is_that_of_the_query_on_every_key(on: Measured) -> None:
    cache = on.read(1)
    queries = on.target.queries(cache, on.text_ids[PREFILL - 1])
    layers = list(attention(cache, queries, 100))
    assert len(layers) == len(queries) == on.target.cache_shape.num_layers
    keys, query = cache.stored(1)[0][0, :100], queries[1, 0, 0]
    expected = (keys @ query / query.shape[0] ** 0.5).softmax(0)
    assert torch.allclose(layers[1][0, 0], expected, atol=1e-6)


def test_more_keys_recover_more_attention(on: Measured) -> None:
    found = list(recovered(on))
    assert [list(each) for each in found] == [["layer", "256 keys", "300 keys", "1,024 keys"]] * len(found)
    for each in found:
        assert 256 / PREFILL < each["256 keys"] < each["300 keys"] < each["1,024 keys"] < 1


def test_the_last_token_of_the_prompt_recovers_what_it_chose(on: Measured) -> None:
    found = list(locality(on))
    at_first = [each["share"] for each in found if each["tokens"] == 0]
    assert at_first == pytest.approx([each["300 keys"] for each in recovered(on)], abs=1e-6)
    assert sorted({each["tokens"] for each in found}) == [0, 1, 2, 4, 8, 11]
    later = [each["share"] for each in found if each["tokens"]]
    assert sum(later) / len(later) < sum(at_first) / len(at_first)


def test_triforce_finds_of_a_needle_what_the_full_cache_finds(on: Measured) -> None:
    found = {each["cache"]: each for each in needles(on)}
    assert list(found) == ["streaming", "h2o", "retrieval", "summary", "full", "TriForce"]
    assert found["TriForce"]["accuracy"] == found["full"]["accuracy"]
    assert all(each["ms_per_token"] > 0 for each in found.values())


def test_keys_take_more_of_memory_the_longer_the_text(on: Measured) -> None:
    found = list(bottlenecks(on))
    shares = [each["kv_share_of_memory"] for each in found]
    assert shares == sorted(shares)
    assert all(each["kv_mb"] > 0 < each["weights_ms"] for each in found)
    assert len({each["weights_mb"] for each in found}) == 1


def test_joined_trees_have_common_beginnings_once() -> None:
    tree = joined([DraftTree.chain([1, 2, 3]), DraftTree.chain([1, 2, 4]), DraftTree.chain([5]), DraftTree()])
    assert (tree.token_ids, tree.parents) == ([1, 2, 3, 4, 5], [ROOT, 0, 1, 1, ROOT])


@pytest.mark.slow
def test_independent_chains_change_no_token_and_draft_more_nodes(on: Measured) -> None:
    read = [read_prompt(on.target, Prompt(on.text_ids[:PREFILL], []), 40)]
    arms = PromptArms(on.target, read, 40, 40, 3, 0.9)
    drafted = []
    for width in (1, 3):
        arm = PromptArm({"budget": 100, "width": width}, plan="independent")
        generation, _ = arms.run(new_drafter(on.target, free_rows, arm, None), 0.6)
        drafted.append(generation.engine.counters.num_draft_tokens / generation.engine.num_verifications)
    assert drafted[0] < drafted[1]


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["1-right", "2a", "2b", "3a", "3c"])
def test_a_figure_is_printed(figure: str, tiny_model: Path, text: Path) -> None:
    sizes = ["--prefill", "300", "--tokens", "10", "--threads", "1", "--text", str(text)]
    result = CliRunner().invoke(main, ["papers", "triforce", "--table", figure, "--model", str(tiny_model), *sizes])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Figure {figure.partition('-')[0]}")
