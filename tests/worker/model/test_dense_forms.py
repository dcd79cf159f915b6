"""Dense decoders whose layers are not Llama's, from their files through our kernels: the texts of transformers.

Configs as they are published; widths, layers and vocabularies are cut down.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.exactness.probe import probe_rows
from swiftbatch.worker.exactness.row_agreement import _our_logits, compare
from swiftbatch.worker.kernels.angles import angles
from swiftbatch.worker.kernels.forms import Activation
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.dense import dense_weights
from swiftbatch.worker.model.files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.papers.griffin.griffin_weights import save_griffin
from swiftbatch.worker.papers.griffin.model import GriffinConfig, GriffinModel
from swiftbatch.worker.papers.tokenswift.heads import save_heads
from swiftbatch.worker.target.native_forwards import NativeForwards
from swiftbatch.worker.target.target import TargetModel
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kernels.reference import ACTIVATIONS, ReferenceDecoder
from tests.worker.model.test_dense import saved
from tests.worker.model.test_kinds_engines import decode
from tests.worker.model.test_published_configs import OTHER_FORMS, PUBLISHED

pytestmark = needs_kernels

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
TREES = ("glm4", "olmo2", "gemma", "gemma2")
ACTIVATION_NAMES = {"glm4": "activation_fn", "starcoder2": "act"}  # in their classes
ENGINES = ("auto", "griffin", "token-recycling", "triforce")
NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_RECOVERED = 50, 40, 23


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by their kinds, with all parts that engines draft with."""
    found = {}
    for kind, name in FORMS.items():
        published = OTHER_FORMS[name] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        found[kind] = folder = tmp_path_factory.mktemp(kind)
        config = AutoConfig.for_model(**published)
        saved(folder, config)
        (folder / "config.json").write_text(json.dumps(published))
        saved(folder / PARTS_FOLDER / DRAFT_FOLDER, AutoConfig.for_model(**PUBLISHED["Llama 3.2 1B"]))
        fingerprint = locate_model(str(folder)).fingerprint
        save_heads(folder / PARTS_FOLDER, 0.02 * torch.randn(3, config.hidden_size, config.hidden_size), fingerprint)
        save_griffin(folder / PARTS_FOLDER, GriffinModel(GriffinConfig.for_target(config)), fingerprint)
    return found


def loaded(folder: Path, dtype: str, kv_offload: str | None = None) -> TargetModel:
    target = TargetModel.load(locate_model(str(folder)), dtype, "cpu", kv_offload)
    assert isinstance(target.forwards, NativeForwards)
    return target


def sequences(target: TargetModel, temperature: float = 1.0) -> list[Sequence]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    texts = torch.randint(3, target.vocab_size, (2, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(5))
    return [Sequence(f"s{i}", text.tolist(), params, target.vocab_size) for i, text in enumerate(texts)]


@pytest.mark.parametrize("kind", FORMS)
def test_logits_and_greedy_texts_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[kind], "float32")
    found = compare(target)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows
    texts, theirs = sequences(target, temperature=0.0), load_causal_lm(target.files, torch.float32)
    for text, output in zip(texts, decode(target, "autoregressive", texts), strict=True):
        best = theirs(input_ids=torch.from_numpy(text.token_ids)[None]).logits[0].argmax(-1)
        assert output == best[NUM_PROMPT_TOKENS - 1 : -1].tolist()


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_computed_number_by_number_is_rounded_to_bf16_where_transformers_rounds(
    kind: str, folders: dict[str, Path]
) -> None:
    """Not in products and rotations, whose roundings between are left away."""
    files = locate_model(str(folders[kind]))
    weights, theirs = dense_weights(files, torch.bfloat16), load_causal_lm(files, torch.bfloat16).model
    assert weights is not None
    reference, sizes, token_ids = ReferenceDecoder(weights), weights.sizes, torch.arange(weights.sizes.vocab)
    rows = theirs.embed_tokens(token_ids)
    assert torch.equal(reference._rounded(weights.embedding.float() * sizes.embedding_scale), rows.float())
    assert torch.equal(reference._norm(rows.float(), weights.final_norm), theirs.norm(rows).float())
    wide, mlp = 4 * torch.randn(300, sizes.intermediate, dtype=torch.bfloat16), theirs.layers[0].mlp
    if sizes.activation != Activation.XIELU:  # there every operation is rounded, here the result alone
        activate = getattr(mlp, ACTIVATION_NAMES.get(kind, "act_fn"))
        assert torch.equal(reference._rounded(ACTIVATIONS[sizes.activation](wide.float())), activate(wide).float())
    by_type = {"layer_type": "full_attention"} if kind == "olmo3" else {}
    cosines, _ = theirs.rotary_emb(rows[None], token_ids[None], **by_type)
    num_turned = cosines.shape[-1] // 2
    found = angles(weights.rotary, token_ids.numpy(), torch.bfloat16)[:, :num_turned]
    theirs = cosines[0, :, ::2] if "cohere" in kind else cosines[0, :, :num_turned]  # there neighbours are turned
    assert (found - theirs.float()).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", FORMS)
def test_bf16_is_as_near_to_float64_as_in_transformers(kind: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[kind], "bfloat16")
    token_ids = [7 * each % target.vocab_size for each in range(150)]
    exact, theirs = (
        load_causal_lm(target.files, dtype)(input_ids=torch.tensor([token_ids])).logits[0].double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    ours = _our_logits(target, token_ids).double()
    assert (ours - exact).square().mean() <= 1.1**2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("kind", FORMS)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(kind: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[kind], "bfloat16")
    plain = [decode(target, "autoregressive", [text])[0] for text in sequences(target)]
    for engine in ENGINES:
        fresh, resumed = sequences(target)
        resumed.extend(plain[1][:NUM_RECOVERED])
        assert decode(target, engine, [fresh, resumed]) == plain, engine


@pytest.mark.parametrize("kind", FORMS)
def test_texts_are_the_same_where_keys_and_values_lie_on_a_disk(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    outputs = []
    for kv_offload in (None, str(tmp_path)):
        target = loaded(folders[kind], "bfloat16", kv_offload)
        outputs.append(decode(target, "token-recycling", sequences(target)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("num_rows", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", TREES)
def test_of_many_random_tree_rows_none_differs_in_any_bit(
    kind: str, dtype: str, num_rows: int, folders: dict[str, Path]
) -> None:
    result = probe_rows(loaded(folders[kind], dtype), num_rows, seed=1)
    assert result.num_rows >= num_rows
    assert result.num_differing == 0
