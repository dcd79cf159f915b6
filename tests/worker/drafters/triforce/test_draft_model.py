"""The draft model reads a short window and draws with the same noise."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.engine_options import NUM_SINKS, WINDOW, TriForceOptions
from swiftbatch.worker.drafters.self_speculation import Chain, RoundPlan
from swiftbatch.worker.drafters.triforce import DraftModel, DraftModelProposer, window_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.batch_sampler import create_batch_sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence

VOCAB = 289  # of the tiny model
PARAMS = SamplingParams(max_tokens=2000, temperature=1.0, seed=3, repetition_penalty=1.2)
PLAN = RoundPlan(1, 8, 8, 8)


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model / PARTS_FOLDER / DRAFT_FOLDER)), "bfloat16", "cpu")


def sequence_of(length: int, name: str = "a", params: SamplingParams = PARAMS) -> Sequence:
    generator = np.random.default_rng(length)
    return Sequence(name, generator.integers(0, VOCAB, length).tolist(), params, VOCAB)


def chain_of(sequence: Sequence) -> Chain:
    sampler = create_batch_sampler(VOCAB, torch.device("cpu")).sampler(sequence)
    return Chain(sequence, sampler, None, None, PLAN, 31, 20)  # type: ignore[arg-type]  # no cache is read


def plain_chain(model: TargetModel, sequence: Sequence, length: int) -> list[int]:
    """Return the draft model's tokens, computed anew at every token."""
    sampler, token_ids = TokenSampler(sequence, VOCAB), sequence.token_ids.copy()
    for _ in range(length):
        window = window_of(token_ids, len(sequence))
        fresh = DraftModel(model, TriForceOptions())
        fresh.start("x")
        token_ids = np.append(token_ids, sampler.draw(fresh.logits({"x": window})[0]))
    return token_ids[len(sequence) :].tolist()


def proposer_of(model: TargetModel) -> DraftModelProposer:
    return DraftModelProposer(DraftModel(model, TriForceOptions()), create_batch_sampler(VOCAB, torch.device("cpu")))


def propose(proposer: DraftModelProposer, sequence: Sequence, num_nodes: int = 6) -> DraftTree:
    return proposer.propose([chain_of(sequence)], [(num_nodes, 20)])[0]


@pytest.mark.parametrize("length", [5, 100, 2 * WINDOW - 3, 2 * WINDOW, 5 * WINDOW - 2, 1700])
@pytest.mark.parametrize("params", [PARAMS, PARAMS.model_copy(update={"temperature": 0.0})], ids=["T=1", "T=0"])
def test_a_chain_is_what_the_draft_model_would_draw(model: TargetModel, length: int, params: SamplingParams) -> None:
    sequence = sequence_of(length, params=params)
    proposer = proposer_of(model)
    proposer.start(sequence)
    tree = propose(proposer, sequence)
    assert tree.parents == [-1, 0, 1, 2, 3, 4]
    assert tree.token_ids == plain_chain(model, sequence, 6)


def test_drafts_are_the_same_whatever_was_drafted_before(model: TargetModel) -> None:
    """Rejected tokens leave nothing behind."""
    sequence = sequence_of(2 * WINDOW - 20)
    proposer = proposer_of(model)
    proposer.start(sequence)
    for step in range(12):
        drafted = propose(proposer, sequence).token_ids
        resumed = proposer_of(model)
        resumed.start(sequence)
        assert propose(resumed, sequence).token_ids == drafted
        sequence.extend([*drafted[: step % 4], (drafted[step % 4] + 1) % VOCAB])


def test_a_window_begins_with_the_first_tokens_and_stays_while_a_draft_grows() -> None:
    token_ids = np.arange(4000)
    assert window_of(token_ids[:500], 500).tolist() == list(range(500))
    for num_committed in (512, 513, 767):
        assert window_of(token_ids[: num_committed + 9], num_committed).tolist() == [
            *range(NUM_SINKS),
            *range(WINDOW, num_committed + 9),
        ]
    assert window_of(token_ids[:768], 768)[NUM_SINKS] == 2 * WINDOW


def test_sequences_share_the_forwards_and_draft_what_each_drafts_alone(
    model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [sequence_of(length, name) for length, name in ((40, "a"), (333, "b"), (900, "c"))]
    alone = []
    for sequence in sequences:
        proposer = proposer_of(model)
        proposer.start(sequence)
        alone.append(propose(proposer, sequence))
    together = proposer_of(model)
    for sequence in sequences:
        together.start(sequence)
    group_counts: list[int] = []
    verify = model.verify
    monkeypatch.setattr(model, "verify", lambda groups, *_: group_counts.append(len(groups)) or verify(groups))
    proposals = together.propose([chain_of(sequence) for sequence in sequences], [(6, 20)] * 3)
    assert proposals == alone
    assert group_counts[-5:] == [3] * 5


def test_a_damaged_draft_model_drafts_something_and_ends_no_job(model: TargetModel) -> None:
    sequence, proposer = sequence_of(50), proposer_of(model)
    proposer.start(sequence)
    proposer._draft_model.logits = lambda windows: [torch.full((VOCAB,), torch.nan)] * len(windows)  # type: ignore[method-assign]
    assert propose(proposer, sequence, 3).token_ids == [0, 0, 0]


def test_proposals_keep_to_their_limits(model: TargetModel) -> None:
    sequence = sequence_of(50)
    proposer = proposer_of(model)
    proposer.start(sequence)
    chain = chain_of(sequence)
    for max_nodes, max_depth in ((0, 5), (5, 0), (1, 3), (5, 2), (5, 9)):
        tree = proposer.propose([chain], [(max_nodes, max_depth)])[0]
        assert len(tree) == min(max_nodes, max_depth)
        assert max(tree.depths(), default=0) <= max_depth


def test_a_model_with_too_few_positions_is_refused(tiny_model: Path, target: TargetModel, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_model / PARTS_FOLDER / DRAFT_FOLDER, short)
    config = (short / "config.json").read_text()
    (short / "config.json").write_text(
        config.replace('"max_position_embeddings": 4096', '"max_position_embeddings": 99')
    )
    with pytest.raises(ModelError, match="it has 99 positions; 592 are needed"):
        DraftModel.load(short, target, TriForceOptions())


def test_its_cache_has_room_for_a_window_and_a_draft() -> None:
    assert TriForceOptions().draft_length == NUM_SINKS + 2 * WINDOW + BLOCK
