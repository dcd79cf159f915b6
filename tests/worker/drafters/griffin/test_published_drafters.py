"""Published drafters that read several of the target's layers draft by their definition, and change no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.engine_options import GRIFFIN_PAPER
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter, forwards_of
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.model.model_files import PARTS_FOLDER
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_model import write_tiny_model
from tests.worker.drafters.drafter_parts import free_rows, proposed, run_to_ends
from tests.worker.drafters.griffin import published_drafters as published
from tests.worker.drafters.griffin.griffin_parts import (
    GREEDY,
    by_token,
    guess,
    load,
    random_tokens,
    read_sequence,
    window_positions,
)
from tests.worker.drafters.griffin.published_drafters import (
    CONFIGS,
    HIDDEN,
    IMPORTED_AS,
    NUM_TARGET_LAYERS,
    VOCAB,
    Tensors,
    drafter_of,
    publish,
)
from tests.worker.drafters.griffin.test_published_parts import bring
from tests.worker.model.test_kinds_engines import decode

KINDS = list(CONFIGS)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), NUM_TARGET_LAYERS)


@pytest.fixture(scope="module")
def reference(plain_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(plain_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def model_with(
    plain_model: Path, reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = shutil.copytree(plain_model, folder / "model", ignore=shutil.ignore_patterns(PARTS_FOLDER))
            parts = publish(folder / "published", kind, drafter_of(kind, reference))
            result = bring(IMPORTED_AS[kind], parts, model, model / PARTS_FOLDER)
            assert result.exit_code == 0, result.output
            made[kind] = model
        return made[kind]

    return make


def expected_logits(kind: str, reference: LlamaForCausalLM, text: list[int], drafted: list[int]) -> torch.Tensor:
    tensors = drafter_of(kind, reference)
    if kind == "eagle3":
        return published.eagle3_by_definition(tensors, reference, text, window_positions(len(text)), drafted)
    seen = window_positions(len(text) - 1)
    return published.block_by_definition(kind, tensors, reference, text, seen, drafted)


@pytest.mark.parametrize("length", [1, 2, 40, 64, pytest.param(900, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_formula(
    kind: str, length: int, model_with: Callable[[str], Path], reference: LlamaForCausalLM
) -> None:
    target = load(model_with(kind), "float32")
    text, chain = random_tokens(target, length), [7, 8]
    sequence, cache = read_sequence(target, text, GREEDY)
    forwards = forwards_of(None, target, VOCAB, sees_all=False)
    forwards.start(sequence, cache)
    [candidates] = forwards.follow([sequence])
    tree = DraftTree()
    for depth in range(3):
        logits = expected_logits(kind, reference, text, chain[:depth])
        assert sorted(token for _, token in candidates) == logits.isfinite().nonzero().flatten().tolist()
        torch.testing.assert_close(by_token(candidates), guess(logits)[logits.isfinite()], rtol=1e-3, atol=3e-3)
        if depth < 2 and (length - 1) % 64 + depth < 62:  # the root is at or near the end of a block
            tree = DraftTree.chain(chain[: depth + 1])
            [[candidates]] = forwards.expand([published.level_of(sequence, tree)])
        else:
            break


@pytest.mark.sample(3)
@pytest.mark.parametrize("sampling", [SAMPLED, SAMPLED.model_copy(update={"temperature": 0.0})], ids=["T=1", "T=0"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_and_drafts_are_accepted(
    kind: str, sampling: SamplingParams, model_with: Callable[[str], Path]
) -> None:
    target = load(model_with(kind))
    texts = [random_tokens(target, length, seed=length) for length in (5, 90)]

    def fresh() -> list[Sequence]:
        return [Sequence(f"s{number}", text, sampling, VOCAB) for number, text in enumerate(texts)]

    expected = decode(target, "autoregressive", fresh())
    assert decode(target, "griffin", fresh()) == expected
    sequences = fresh()
    engine = run_to_ends(Engine(target, create_bench_drafter("griffin-paper", target, free_rows)), *sequences)
    assert [each.output_ids.tolist() for each in sequences] == expected
    if sampling.temperature:
        assert engine.counters.num_accepted_tokens > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_tokens", [20, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_sequence_has_the_same_drafts_and_tokens(
    kind: str, num_tokens: int, model_with: Callable[[str], Path]
) -> None:
    """Even where the window has moved; what the target hands out while it generates equals what it replays."""
    target = load(model_with(kind))
    params = SAMPLED.model_copy(update={"max_tokens": num_tokens + 40})

    def drafter() -> GriffinDrafter:
        return GriffinDrafter(forwards_of(None, target, 3, sees_all=False), None, GRIFFIN_PAPER)

    sequence, cache = read_sequence(target, random_tokens(target, 100), params)
    engine = Engine(target, drafter())
    engine.start(sequence, cache)
    while sequence.num_generated_tokens < num_tokens:
        engine.step()
    resumed, cache = read_sequence(target, sequence.token_ids.tolist(), params)
    resumed.noise = sequence.noise  # its prompt's noise, not that of everything read here
    again = drafter()
    again.start(resumed, cache)
    assert proposed(again, resumed, 60, 3) == proposed(engine.drafter, sequence, 60, 3)


@pytest.mark.parametrize("way", ["kernels", "transformers"])
def test_layers_hand_out_their_outputs_and_change_no_bit(
    way: str, plain_model: Path, reference: LlamaForCausalLM
) -> None:
    target = load(plain_model, "float32")
    if way == "transformers":
        target = TargetModel(target.transformers, target.files)
    text, layers = random_tokens(target, 70), (4, 0, 7)
    found = []
    for wanted in ((), layers):
        cache, read = target.new_cache(200), []
        while cache.length < 40:
            read.append(target.read(cache, text[cache.length : 40], wanted))
        [outputs] = target.verify([tree_rows(cache, text[40], DraftTree.chain(text[41:50]))], wanted)
        found.append((torch.cat([*read, outputs.hidden]), outputs.logits))
    assert torch.equal(found[0][1], found[1][1])
    with torch.no_grad():
        states = reference(torch.tensor([text[:50]]), output_hidden_states=True).hidden_states
    normed_last = reference.model.norm(found[1][0][:, 2 * HIDDEN :])
    torch.testing.assert_close(found[1][0][:, : 2 * HIDDEN], torch.cat([states[5][0], states[1][0]], -1), **CLOSE)
    torch.testing.assert_close(normed_last, states[8][0], **CLOSE)


CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
REFUSALS: dict[str, tuple[str, Callable[[Tensors], object], dict[str, Any], str]] = {
    "no fc": ("eagle3", lambda t: t.pop("fc.weight"), {}, "`fc.weight` is missing; expected floats [64, 192]"),
    "a wide fc": (
        "eagle3",
        lambda t: t.update({"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}),
        {},
        "`fc.weight` is torch.float32 [64, 128]; expected floats [64, 192]",
    ),
    "NaN": (
        "eagle3",
        lambda t: t["midlayer.hidden_norm.weight"].fill_(torch.nan),
        {},
        "`midlayer.hidden_norm.weight` has values that are not finite",
    ),
    "no d2t": ("eagle3", lambda t: t.pop("d2t"), {}, "`d2t` is missing; expected integers [120]"),
    "d2t of floats": (
        "eagle3",
        lambda t: t.update(d2t=torch.zeros(120)),
        {},
        "`d2t` is torch.float32 [120]; expected integers [120]",
    ),
    "two of a token": (
        "eagle3",
        lambda t: t["d2t"].copy_(-torch.arange(120)),
        {},
        "`d2t` does not name 120 of the model's 289 tokens",
    ),
    "another t2d": ("eagle3", lambda t: t["t2d"].fill_(True), {}, "`t2d` names other tokens than `d2t`"),
    "another head": (
        "eagle3",
        lambda t: t.update({"lm_head.weight": torch.ones(9, HIDDEN)}),
        {},
        "`lm_head.weight` is",
    ),
    "another vocabulary": ("eagle3", len, {"vocab_size": 999}, "config.json has vocab_size = 999; expected 289"),
    "a norm in front": ("eagle3", len, {"norm_before_residual": True}, "norm_before_residual = True; expected false"),
    "two layers": ("eagle3", len, {"num_hidden_layers": 2}, "config.json has num_hidden_layers = 2; expected 1"),
    "layers beyond": (
        "eagle3",
        len,
        {"eagle_config": {LAYER_IDS: [1, 2, 8]}},
        f"its {LAYER_IDS} are [1, 2, 8] of a model with 8 layers",
    ),
    "layers counted otherwise": ("eagle3", len, {LAYER_IDS: [2, 4, 5]}, f"its {LAYER_IDS} are not in eagle_config"),
    "EAGLE-3 as EAGLE": ("eagle", len, {}, "so it is EAGLE-3's; import it as `eagle3`"),
    "EAGLE as EAGLE-3": (
        "eagle3",
        lambda t: t.pop("midlayer.hidden_norm.weight"),
        {},
        "hidden_norm.weight` is missing",
    ),
    "no norm of queries": (
        "dflash",
        lambda t: t.pop("layers.1.self_attn.q_norm.weight"),
        {},
        "`layers.1.self_attn.q_norm.weight` is missing; expected floats [32]",
    ),
    "a third layer": ("dflash", lambda t: t.update({"layers.2.x": torch.ones(1)}), {}, "unknown tensors layers.2.x"),
    "another block drafter": ("dflash", len, {"architectures": ["X"]}, "its architectures are ['X'], and we compute"),
    "more in a config": (
        "dflash",
        len,
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1], "projector_type": "x"}},
        "its dflash_config has projector_type",
    ),
    "windows": ("dflash", len, {"layer_types": ["sliding_attention"] * 2}, "its layer_types are ['sliding_attention'"),
    "types that are no list": ("dflash", len, {"layer_types": 3}, "its layer_types are 3; expected"),
    "a list as config": ("dflash", len, {"dflash_config": [1]}, "its dflash_config is [1]; expected"),
    "endless blocks": ("dflash", len, {"block_size": 10**9}, "in blocks of 1000000000"),
    "numbers beyond bfloat16": (
        "eagle3",
        lambda t: t.update({"fc.weight": torch.full((HIDDEN, 3 * HIDDEN), 1e300, dtype=torch.float64)}),
        {},
        "fc.weight has numbers that bfloat16 does not hold",
    ),
    "d2t of truths": (
        "eagle3",
        lambda t: t.update(d2t=torch.zeros(120, dtype=torch.bool)),
        {},
        "`d2t` is torch.bool [120]; expected integers [120]",
    ),
    "no masks": ("dspark", len, {"mask_token_id": VOCAB}, "its mask_token_id is 289 of 289 tokens, in blocks of 4"),
    "gates": ("dspark", len, {"markov_head_type": "gated"}, "markov_head_type = 'gated'; expected \"vanilla\""),
    "other layers": ("dspark", len, {"num_target_layers": 9}, "config.json has num_target_layers = 9; expected 8"),
    "no layers": ("dspark", len, {"target_layer_ids": [8]}, "its target_layer_ids are [8] of a model with 8 layers"),
    "another model's head": (
        "dspark",
        lambda t: t["lm_head.weight"].mul_(2),
        {},
        "its lm_head.weight is not that of",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_damaged_or_not_computed_is_refused_in_a_line(
    what: str, plain_model: Path, reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    kind, change, config, words = REFUSALS[what]
    form = "eagle3" if kind == "eagle" else kind
    change(tensors := drafter_of(form, reference))
    folder = publish(tmp_path / "published", form, tensors, **config)
    result = bring("eagle" if kind == "eagle" else IMPORTED_AS[kind], folder, plain_model, tmp_path / "parts")
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.startswith(f"swiftbatch: {folder}: ")
    assert result.output.count("\n") == 1
    assert not (tmp_path / "parts").exists()


def test_layer_types_may_be_null(plain_model: Path, reference: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", "dflash", drafter_of("dflash", reference), layer_types=None)
    assert bring(IMPORTED_AS["dflash"], folder, plain_model, tmp_path / "parts").exit_code == 0


def test_layers_and_all_tokens_may_be_named_in_the_config(
    plain_model: Path, reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    tensors = drafter_of("eagle3", reference)
    tensors |= {"lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    del tensors["d2t"], tensors["t2d"]
    given = {"draft_vocab_size": None, "eagle_config": {LAYER_IDS: [0, 2, 7], "use_aux_hidden_state": True}}
    folder = publish(tmp_path / "published", "eagle3", tensors, **given)
    assert bring("eagle3", folder, plain_model, tmp_path / "parts").exit_code == 0
    forwards = forwards_of(tmp_path / "parts", load(plain_model), 3, sees_all=False)
    assert forwards.feature_layers == (0, 2, 7)
