"""An MTP layer equals its kind's layer in torch, and its drafts change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.mtp import predictor
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.mtp_layers import NoPredictorError, predictor_of
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.mtp.mtp_parts import CHECKPOINTS, fed, forwards_of, loaded, publish_with_layer
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import make_twins
from tests.worker.model.latent_configs import WITH_INDEXERS

TEXT = [(7 * number * number + 3 * number) % 60 for number in range(80)]
OFTEN = ("DeepSeek R1", "Qwen3.5")
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]


@pytest.mark.parametrize("name", CASES)
def test_the_layer_of_a_checkpoint_gives_what_it_gives_in_torch(name: str, tmp_path: Path) -> None:
    module = publish_with_layer(name, tmp_path)
    target = loaded(tmp_path)
    forwards = forwards_of(target)
    sequence = Sequence("a", TEXT, SamplingParams(max_tokens=9, temperature=0.0), target.vocab_size, target.device)
    forwards.start(sequence, target.new_cache(100))
    hidden = torch.randn(len(TEXT) - 1, target.hidden_size, generator=torch.Generator().manual_seed(1))
    forwards.take("a", 0, hidden)
    [candidates] = forwards.follow([sequence])
    embeddings = target.forwards.embed(torch.tensor(TEXT[1:]))
    expected = module(hidden[None], embeddings[None])[0, -1]
    found = fed(forwards, "a")
    if CHECKPOINTS[name][1].feeds_normed:
        assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    assert candidates[0][1] == int(target.logits(expected[None]).argmax())


def generated(target: TargetModel, engine_name: str, sampling: SamplingParams, num_jobs: int = 3) -> list[list[int]]:
    engine = Engine(target, create_drafter(engine_name, target, free_rows))
    sequences = [
        Sequence(f"{number}", TEXT[: 20 + 25 * number], sampling, target.vocab_size, target.device)
        for number in range(num_jobs)
    ]
    for sequence in sequences:
        engine.start(sequence)
        engine.step()  # they join one by one
    while engine.sequences:
        engine.step()
        for sequence in [each for each in engine.sequences if each.finish_reason is not None]:
            engine.stop(sequence)
    if engine_name == "mtp":
        assert engine.counters.num_draft_tokens > 0
    return [sequence.token_ids.tolist() for sequence in sequences]


@pytest.mark.parametrize("name", CASES)
def test_drafts_of_the_layer_change_no_token(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = loaded(tmp_path, "bfloat16")
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
        assert generated(target, "mtp", sampling) == generated(target, "autoregressive", sampling)


@pytest.mark.parametrize("name", ["MiMo", "DeepSeek R1"])
def test_a_full_cache_keeps_the_first_and_the_newest_rows_at_their_positions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_with_layer(name, tmp_path)
    target = loaded(tmp_path)
    text = (TEXT * 5)[:400]
    sampling = SamplingParams(max_tokens=9, temperature=0.0)

    def entries() -> torch.Tensor:
        sequence = Sequence("a", text, sampling, target.vocab_size, target.device)
        forwards = forwards_of(target)
        forwards.start(sequence, target.new_cache(500))
        hidden = torch.randn(len(text) - 1, target.hidden_size, generator=torch.Generator().manual_seed(1))
        for start in range(0, len(hidden), 30):
            forwards.take("a", start, hidden[start : start + 30])
            forwards.follow([sequence])
        own = forwards._tracks["a"]
        return torch.stack(own.room.cache.layer(0))[:, :, : own.num_known]

    everything = entries()
    for constant, number in {"WINDOW": 64, "MOST_AT_ONCE": 64, "NUM_ENTRIES": 192}.items():
        monkeypatch.setattr(predictor, constant, number)
    kept = entries()
    newest = kept.shape[2] - 64
    assert 64 <= newest <= 128
    expected = torch.cat([everything[:, :, :64], everything[:, :, -newest:]], dim=2)
    assert torch.allclose(kept, expected, atol=1e-5)


def test_a_quantized_layer_says_what_the_numbers_say_that_it_stands_for(tmp_path: Path) -> None:
    publish_with_layer("MiMo", tmp_path)
    config, tensors = CHECKPOINTS["MiMo"][0], load_file(tmp_path / "model.safetensors")
    said = []
    for folder in make_twins(EXAMPLES["fp8 in blocks of 128"], tmp_path / "twins", config, tensors):
        target = loaded(folder)
        forwards = forwards_of(target)
        sequence = Sequence("a", TEXT, SamplingParams(max_tokens=9, temperature=0.0), target.vocab_size, target.device)
        forwards.start(sequence, target.new_cache(100))
        forwards.take("a", 0, torch.randn(len(TEXT) - 1, 128, generator=torch.Generator().manual_seed(1)))
        said.append((forwards.follow([sequence]), fed(forwards, "a")))
    assert said[0][0] == said[1][0]
    assert torch.equal(said[0][1], said[1][1])


@pytest.mark.parametrize("name", ["MiMo", "Qwen3.5"])
def test_a_job_that_moves_on_goes_on_with_the_same_tokens(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = loaded(tmp_path, "bfloat16")
    sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=4, ignore_eos=True)
    [expected] = generated(target, "autoregressive", sampling, num_jobs=1)
    first = Sequence("0", TEXT[:20], sampling, target.vocab_size, target.device)
    engine = Engine(target, create_drafter("mtp", target, free_rows))
    slot = engine.start(first)
    while len(first) < 23:
        engine.step()
    request = DraftRequest(first, 9, 3)
    [once], [twice] = engine.drafter.propose([request]), engine.drafter.propose([request])
    assert once == twice
    assert len(once) > 0
    while len(first) < 45:
        engine.step()
    again = Sequence("0", TEXT[:20], sampling, target.vocab_size, target.device)
    again.extend(first.token_ids[20:45].tolist())
    cache = target.new_cache(again.max_length)
    if cache.is_by_position:  # otherwise it is read again
        cache.load(slot.cache.kv(0, 44))
    engine = Engine(target, create_drafter("mtp", target, free_rows))
    engine.start(again, cache)
    while again.finish_reason is None:
        engine.step()
    assert engine.counters.num_draft_tokens > 0
    assert again.token_ids.tolist() == expected


def test_auto_tries_the_layer_by_turns_and_without_one_it_is_as_it_was(tmp_path: Path) -> None:
    publish_with_layer("Qwen3.5", tmp_path)
    target = loaded(tmp_path, "bfloat16")
    assert "mtp" in auto(target, free_rows, None).ways
    sampling = SamplingParams(max_tokens=90, temperature=1.0, seed=4, ignore_eos=True)
    assert generated(target, "auto", sampling, 1) == generated(target, "autoregressive", sampling, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inspect_model(str(tmp_path)).predictor is None
    assert "mtp" not in auto(loaded(tmp_path, "bfloat16"), free_rows, None).ways


def test_a_layer_that_is_not_understood_is_named_and_left_alone(tmp_path: Path) -> None:
    publish_with_layer("MiMo", tmp_path)
    assert inspect_model(str(tmp_path)).predictor == "auto drafts with the first of them, where that is faster"
    tensors = load_file(tmp_path / "model.safetensors")
    more = tensors | {"model.mtp_layers.0.mlp.other.weight": torch.zeros(3)}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = inspect_model(str(tmp_path)).predictor
    assert said is not None
    assert said.startswith("not used: its tensors are others")
    target = loaded(tmp_path)
    assert "mtp" not in auto(target, free_rows, None).ways
    with pytest.raises(ModelError, match="are not used"):
        create_drafter("mtp", target, free_rows)


@pytest.mark.parametrize(("part", "shape"), [("token_layernorm", (129,)), ("input_proj", (128, 128))])
def test_a_layer_whose_parts_have_another_width_is_named_and_left_alone(
    tmp_path: Path, part: str, shape: tuple[int, ...]
) -> None:
    publish_with_layer("MiMo", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {f"model.mtp_layers.0.{part}.weight": torch.ones(shape)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = inspect_model(str(tmp_path)).predictor
    assert said is not None
    assert f"is {list(shape)}; expected" in said
    target = loaded(tmp_path)
    assert "mtp" not in auto(target, free_rows, None).ways
    with pytest.raises(ModelError, match="are not used"):
        create_drafter("mtp", target, free_rows)


def test_a_matrix_without_rows_is_named(tmp_path: Path) -> None:
    publish_with_layer("Qwen3.5", tmp_path)
    empty = {"mtp.layers.0.self_attn.k_proj.weight": torch.empty(0, 64)}
    save_file(load_file(tmp_path / "model.safetensors") | empty, tmp_path / "model.safetensors", {"format": "pt"})
    target = loaded(tmp_path)
    assert "mtp" not in auto(target, free_rows, None).ways
    with pytest.raises(ModelError, match="found 0 rows, expected those of heads"):
        create_drafter("mtp", target, free_rows)


def test_a_layer_with_an_indexer_is_passed_over(tmp_path: Path) -> None:
    join = ("model.layers.2.eh_proj.weight", StoredTensor("BF16", (128, 256)))
    with pytest.raises(NoPredictorError, match="attend to keys that an indexer chooses"):
        predictor_of([join], WITH_INDEXERS["GLM 5"], tmp_path)
