"""Jobs on 2 or 4 GPUs have the tokens of one GPU, and go on from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.forward.cuda.rank_parts import target_on_ranks
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.routed_expert_configs import ROUTED
from tests.worker.model.test_kinds_engines import decode
from tests.worker.session.recurrent_parts import save_recurrent_model

pytestmark = pytest.mark.long

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = ROUTED["Qwen3 30B A3B"] | HEADS
LATENT = WITH_LATENTS["DeepSeek R1"] | {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 64}
LATENT |= {"intermediate_size": 512}
TEXT = [7 * each % 64 for each in range(70)]


def files_of(kind: str, folder: Path) -> ModelFiles:
    if kind == "states":
        changes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
        return locate_model(str(save_recurrent_model(folder, **changes)))
    write_experts({"experts": EXPERTS, "latent": LATENT}[kind], folder)
    return locate_model(str(folder))


KINDS = ["experts", pytest.param("latent", marks=pytest.mark.slow), pytest.param("states", marks=pytest.mark.slow)]


def on_ranks(files: ModelFiles, num_ranks: int) -> TargetModel:
    return cuda_target(files, torch.bfloat16) if num_ranks == 1 else target_on_ranks(files, num_ranks)


def logits_of(target: TargetModel, from_: TargetModel | None, num_kept: int) -> torch.Tensor:
    """Return the logits behind a text, of which `from_` has read the first positions."""
    cache = target.new_cache(100)
    if from_ is not None:
        theirs, left = from_.new_cache(100), TEXT
        while left:
            left = left[len(from_.read(theirs, left)) :]
        states = theirs.states()
        cache.load(theirs.kv(0, num_kept))
        if states is not None:
            cache.set_states(states)
    left = TEXT[cache.length :]
    while left:
        hidden = target.read(cache, left).clone()
        left = left[len(hidden) :]
    return target.logits(hidden[-1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_with_the_same_bits_on_any_number_of_gpus(kind: str, tmp_path: Path) -> None:
    files = files_of(kind, tmp_path)
    one, two, four = (on_ranks(files, number) for number in (1, 2, 4))
    expected = logits_of(one, None, 0)
    for target, from_ in ((two, None), (two, one), (four, two), (one, four)):
        assert torch.equal(logits_of(target, from_, 66), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_with_drafts_on_two_gpus_have_the_tokens_of_one(kind: str, tmp_path: Path) -> None:
    files, params = files_of(kind, tmp_path), SamplingParams(max_tokens=4, seed=3, ignore_eos=True)

    def sequences(vocab: int) -> list[Sequence]:
        return [Sequence(f"s{each}", [each, 5, 7, 5], params, vocab) for each in (3, 4)]

    one, two = on_ranks(files, 1), on_ranks(files, 2)
    expected = decode(one, "autoregressive", sequences(one.vocab_size))
    assert decode(two, "token-recycling", sequences(one.vocab_size)) == expected
