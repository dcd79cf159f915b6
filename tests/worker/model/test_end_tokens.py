"""End tokens come from the generation config (or config) and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.model_files import eos_token_ids_of, locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.tiny_targets import model as model
from tests.worker.session.session_parts import body, make_run, record, run_to_end


def changed(file: Path, **values: Any) -> None:
    """None removes a value."""
    said = {**(json.loads(file.read_text()) if file.exists() else {}), **values}
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


def in_the_map(model: Path, name: str) -> None:
    changed(model / "special_tokens_map.json", eos_token={"content": name, "lstrip": False})


def in_both(model: Path, name: str) -> None:
    in_the_map(model, name)
    changed(model / "tokenizer_config.json", eos_token="fox")


def in_the_config(model: Path, name: str) -> None:
    changed(model / "tokenizer_config.json", eos_token=name)


def in_both_of_a_newer_one(model: Path, name: str) -> None:
    in_the_map(model, "fox")
    [eos] = (number for number, each in listed(model).items() if each == name)
    changed(model / "tokenizer_config.json", eos_token=name, added_tokens_decoder={str(eos): {"content": name}})


def listed(model: Path) -> dict[int, str]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {number: name for name, number in vocabulary.items()}


@pytest.mark.parametrize("place", [in_the_map, in_both, in_the_config, in_both_of_a_newer_one])
@pytest.mark.parametrize("eos", [0, 30])
def test_the_tokenizer_s_end_is_the_one_that_transformers_knows(
    model: Path, place: Callable[[Path, str], None], eos: int
) -> None:
    changed(model / "generation_config.json", eos_token_id=7)
    changed(model / "tokenizer_config.json", eos_token=None, added_tokens_decoder=None)
    place(model, listed(model)[eos])
    files = locate_model(str(model))
    assert eos_token_ids_of(files) == {7, AutoTokenizer.from_pretrained(model).eos_token_id} == {7, eos}
    assert TextCodec(files)._eos_token_ids == eos_token_ids_of(files)
    assert TargetModel.load(files, "float32", "cpu").eos_token_ids == eos_token_ids_of(files)
    assert load_causal_lm(files, torch.float32).generation_config.eos_token_id == sorted(eos_token_ids_of(files))


def test_a_config_counts_where_no_generation_config_names_an_end(model: Path) -> None:
    changed(model / "tokenizer_config.json", eos_token=None)
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    changed(model / "config.json", eos_token_id=[5, 6])
    (model / "generation_config.json").unlink(missing_ok=True)
    assert eos_token_ids_of(locate_model(str(model))) == {5, 6}
    changed(model / "generation_config.json", eos_token_id=7)
    assert eos_token_ids_of(locate_model(str(model))) == {7}
    changed(model / "generation_config.json", eos_token_id=[8, 10**6, -1])
    assert eos_token_ids_of(locate_model(str(model))) == {8}
    changed(model / "tokenizer_config.json", eos_token="<|absent|>")  # the library adds it after the model's
    assert eos_token_ids_of(locate_model(str(model))) == {8}


@pytest.mark.parametrize("engine", ["autoregressive", "token-recycling"])
def test_a_fine_tune_s_text_ends_at_the_tokenizer_s_end_of_a_turn(tmp_path: Path, model: Path, engine: str) -> None:
    """Its generation config is often the base model's."""
    names = listed(model)
    changed(model / "generation_config.json", eos_token_id=7)
    changed(model / "tokenizer_config.json", eos_token=names[9])
    run = make_run(tmp_path / "run")
    drawn = {"logit_bias": {"9": 2.0}, "temperature": 1.0, "repetition_penalty": 1.0}
    jobs = [record(name, 200, {**drawn, "ignore_eos": name == "on"}, prompt="a fox") for name in ("off", "on")]
    jobs.append(record("json", 200, {**drawn, "ignore_eos": False, "structured_outputs": {"regex": "[a-z ]+"}}))
    run_to_end(run, model, *jobs, engine=engine)
    [ended], [went_on], [structured] = (body(run, job)["choices"] for job in jobs)
    assert (ended["finish_reason"], went_on["finish_reason"]) == ("stop", "length")
    assert went_on["text"].startswith(ended["text"])
    assert structured["finish_reason"] == "stop"
