"""Dense decoders other than Llama give transformers' texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.worker.exactness.forward_comparisons import _our_logits, probe_rows
from swiftbatch.worker.kernels.layer_specs import Activation
from swiftbatch.worker.kernels.rope_cos_sin import angles
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kernels.reference import ACTIVATIONS, ReferenceDecoder
from tests.worker.model.kind_promises import (
    check_a_disk_changes_no_text,
    check_engines_give_plain_tokens_beside_a_resumed_job,
    check_texts_are_those_of_transformers,
    loaded,
    save_parts,
)
from tests.worker.model.test_dense_loading import saved
from tests.worker.model.test_other_forms import OTHER_FORMS

pytestmark = [pytest.mark.long, needs_kernels]

FORMS = {
    "glm4": "GLM-4 9B 0414",
    "olmo2": "OLMo 2 7B",
    "exaone4": "EXAONE 4.0 1.2B, which has no windows",
    "gemma": "Gemma 2B, whose head is tied by default",
    "arcee": "AFM 4.5B",
    "cohere": "Command R",
    "hunyuan_v1_dense": "Hunyuan 7B, without its long positions",
    "helium": "Helium 1 2B",
    "gemma2": "Gemma 2 27B",
    "olmo3": "OLMo 3 7B",
    "exaone4 with windows": "EXAONE 4.0 32B",
    "cohere with norms of heads": "Command R+, which norms heads",
    "cohere2": "Command R7B",
    "apertus": "Apertus 8B",
    "starcoder2": "StarCoder2 7B",
    "ministral3": "Ministral 3 8B's text",
}
DIFFERING = ("glm4", "gemma2", "olmo3", "cohere2", "apertus", "starcoder2")  # norms, windows, activations, biases
TREES = ("glm4", "olmo2", "gemma", "gemma2")
ACTIVATION_NAMES = {"glm4": "activation_fn", "starcoder2": "act"}  # in their classes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind, name in FORMS.items():
        published = OTHER_FORMS[name] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        found[kind] = folder = tmp_path_factory.mktemp(kind)
        config = AutoConfig.for_model(**published)
        saved(folder, config)
        (folder / "config.json").write_text(json.dumps(published))
        save_parts(folder, config)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", FORMS)
def test_logits_and_greedy_texts_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    check_texts_are_those_of_transformers(loaded(folders[kind], "float32"))


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_computed_number_by_number_is_rounded_to_bf16_where_transformers_rounds(
    kind: str, folders: dict[str, Path]
) -> None:
    """Inner roundings of products and rotations are skipped."""
    files = locate_model(str(folders[kind]))
    weights, theirs = dense_weights(files, torch.bfloat16), load_causal_lm(files, torch.bfloat16).model
    assert weights is not None
    reference, sizes, token_ids = ReferenceDecoder(weights), weights.sizes, torch.arange(weights.sizes.vocab)
    rows = theirs.embed_tokens(token_ids)
    assert torch.equal(reference._rounded(weights.embedding.float() * sizes.embedding_scale), rows.float())
    assert torch.equal(reference._norm(rows.float(), weights.final_norm), theirs.norm(rows).float())
    wide, mlp = 4 * torch.randn(300, sizes.intermediate, dtype=torch.bfloat16), theirs.layers[0].mlp
    if sizes.activation != Activation.XIELU:  # transformers rounds every operation there, the kernels only the result
        activate = getattr(mlp, ACTIVATION_NAMES.get(kind, "act_fn"))
        assert torch.equal(reference._rounded(ACTIVATIONS[sizes.activation](wide.float())), activate(wide).float())
    by_type = {"layer_type": "full_attention"} if kind == "olmo3" else {}
    cosines, _ = theirs.rotary_emb(rows[None], token_ids[None], **by_type)
    num_rotary_dims = cosines.shape[-1] // 2
    found = angles(weights.rotary, token_ids.numpy(), torch.bfloat16)[:, :num_rotary_dims]
    theirs = cosines[0, :, ::2] if "cohere" in kind else cosines[0, :, :num_rotary_dims]  # there neighbours are turned
    assert (found - theirs.float()).abs().max() <= 1e-6


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", FORMS)
def test_bf16_is_as_near_to_float64_as_in_transformers(kind: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[kind], "bfloat16")
    token_ids = [7 * each % target.vocab_size for each in range(150)]
    exact, theirs = (
        load_causal_lm(target.files, dtype)(input_ids=torch.tensor([token_ids])).logits[0].double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    ours = _our_logits(target, token_ids, target.new_cache(len(token_ids))).double()
    assert (ours - exact).square().mean() <= 1.1**2 * (theirs - exact).square().mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [pytest.param(n, marks=() if n in DIFFERING else pytest.mark.slow) for n in FORMS])
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(kind: str, folders: dict[str, Path]) -> None:
    check_engines_give_plain_tokens_beside_a_resumed_job(loaded(folders[kind], "bfloat16"))


@pytest.mark.parametrize("kind", [pytest.param(n, marks=() if n in TREES else pytest.mark.slow) for n in FORMS])
def test_texts_are_the_same_where_keys_and_values_lie_on_a_disk(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    check_a_disk_changes_no_text(folders[kind], tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_rows", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", TREES)
def test_of_many_random_tree_rows_none_differs_in_any_bit(
    kind: str, dtype: str, num_rows: int, folders: dict[str, Path]
) -> None:
    result = probe_rows(loaded(folders[kind], dtype), num_rows, seed=1)
    assert result.num_rows >= num_rows
    assert result.num_differing == 0
