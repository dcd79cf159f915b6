from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftbatch.worker.drafters.catalogue import ENGINES, check_parts
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model
from swiftbatch.worker.training import train_all as everything
from swiftbatch.worker.training.recipes import DraftRecipe, HeadRecipe
from swiftbatch.worker.training.target_recipe import TargetRecipe, WindowKind
from swiftbatch.worker.training.train_all import train_all
from tests import ROOT
from tests.worker.drafters.griffin.griffin_training_parts import FAST as FAST_GRIFFIN
from tests.worker.training.small_target import score_short_texts, train_small_targets

pytestmark = pytest.mark.long

TEXTS = HeadRecipe(num_book_tokens=200, num_own_texts=4, num_prompt_tokens=16, num_own_tokens=60, num_steps=2)
TARGET = TargetRecipe(2, kinds=(WindowKind("short", 64, 2, 1.0),), num_warmup_steps=1)
DRAFT = DraftRecipe(2, window_length=64, texts=TEXTS)
GRIFFIN = dataclasses.replace(FAST_GRIFFIN, num_steps=2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    train_small_targets(monkeypatch)
    score_short_texts(monkeypatch)


def train(data: Path, output: Path) -> list[str]:
    said: list[str] = []
    train_all(data, output, TARGET, said.append, TEXTS, DRAFT, GRIFFIN)
    return said


@pytest.mark.slow  # each training has its own tests, also of kills
def test_everything_is_made_in_order_once_and_told_of_in_the_card(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, original = tmp_path / "model", everything.train_griffin

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(everything, "train_griffin", killed)
    with pytest.raises(KeyboardInterrupt):
        train(books, output)
    assert "GRIFFIN" not in (output / "MODEL_CARD.md").read_text(encoding="utf-8")
    monkeypatch.setattr(everything, "train_griffin", original)
    said = train(books, output)
    assert [line.endswith("finished; nothing to do") for line in said[:3]] == [True] * 3
    files = locate_model(str(output))
    for engine in ENGINES:
        check_parts(engine, str(output), files.fingerprint, None)
    card = (output / "MODEL_CARD.md").read_text(encoding="utf-8")
    logs = {path.name: path.read_text(encoding="utf-8") for path in output.rglob("*_log.jsonl")}
    for name in ("train", "tokenswift", "draft", "griffin"):
        [*_, after] = [record for line in logs[f"{name}_log.jsonl"].splitlines() if (record := json.loads(line))]
        assert after["when"] == "after"
        share = after.get("bits_per_byte") or after.get("top", [[0]])[0][0] or next(iter(after["same"].values()))
        share = share[0] if isinstance(share, list) else share
        assert (f"{share:.3f} bits" if name == "train" else f"{100 * share:.1f}") in card
    assert "{" not in card
    assert {path.name for path in output.rglob("*_training.png")} == {f"{name[:-10]}_training.png" for name in logs}
    assert not list(output.glob("**/*features"))


@pytest.mark.slow
def test_transformers_loads_the_folder_as_it_is(books: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    train(books, output)
    assert [path.name for path in output.glob("*.safetensors")] == ["model.safetensors"]
    assert len({path.stat().st_mode for path in (output / "config.json", *output.rglob("*.safetensors"))}) == 1
    assert (output / PARTS_FOLDER).is_dir()
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True, local_files_only=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(output, local_files_only=True)
    ids = tokenizer("the quick brown fox", return_tensors="pt").input_ids
    assert ids[0, 0] == model.config.bos_token_id
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2


@pytest.mark.slow
def test_trainings_need_no_triton_on_a_processor() -> None:
    program = "import sys; sys.modules['triton'] = None; import swiftbatch.worker.training.train_all"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
