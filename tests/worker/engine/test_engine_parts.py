"""Missing or foreign trained parts are reported before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swiftbatch.jobs.errors import ModelError
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.drafters.catalogue import ENGINES, check_parts, create_drafter
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, HEADS_FILE, PARTS_FOLDER, locate_model
from tests.worker.drafters.drafter_parts import free_rows


def test_engines_without_trained_parts_ask_for_no_model() -> None:
    for engine, entry in ENGINES.items():
        if entry.part is None:
            check_parts(engine, "no/model", "", None)


def test_parts_of_the_model_are_taken(tiny_model: Path) -> None:
    check_parts("tokenswift", str(tiny_model), locate_model(str(tiny_model)).fingerprint, None)


def test_a_missing_part_says_how_to_train_it(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"engine tokenswift: no file .*train tokenswift --model .*--draft-model"):
        check_parts("tokenswift", str(tiny_model), "", str(tmp_path))


def test_a_part_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    save_heads(tmp_path, torch.zeros(3, 64, 64), "another")
    with pytest.raises(ModelError, match="belongs to a model with fingerprint another"):
        check_parts("tokenswift", str(tiny_model), locate_model(str(tiny_model)).fingerprint, str(tmp_path))


def test_a_draft_model_among_the_parts_or_in_a_named_folder_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    check_parts("triforce", str(tiny_model), "", None)
    check_parts("triforce", str(tiny_model), "", str(tiny_model / PARTS_FOLDER / DRAFT_FOLDER))
    check_parts("triforce", str(tiny_model), "", str(tiny_model / PARTS_FOLDER))


@pytest.mark.parametrize(("engine", "name"), [("tokenswift", HEADS_FILE), ("triforce", DRAFT_FOLDER)])
def test_a_part_beside_the_weights_is_told_where_to_go(
    tiny_model: Path, tmp_path: Path, engine: str, name: str
) -> None:
    old = tmp_path / "old"
    shutil.copytree(tiny_model, old)
    (old / PARTS_FOLDER / name).rename(old / name)
    with pytest.raises(ModelError, match=f"; move {old / name} into {old / PARTS_FOLDER}"):
        check_parts(engine, str(old), locate_model(str(old)).fingerprint, None)


def test_a_missing_draft_model_says_how_to_train_it(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns(DRAFT_FOLDER))
    with pytest.raises(ModelError, match=r"no draft model in .*bare/parts/draft; train it .*train draft"):
        check_parts("triforce", str(bare), "", None)


@pytest.mark.parametrize("change", ["size", "tokens"])
def test_a_draft_model_with_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path, change: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model / PARTS_FOLDER / DRAFT_FOLDER, other)
    name, old, new = {
        "size": ("config.json", '"vocab_size": 289', '"vocab_size": 288'),
        "tokens": ("tokenizer.json", '"the"', '"eht"'),
    }[change]
    text = (other / name).read_text()
    assert old in text
    (other / name).write_text(text.replace(old, new))
    with pytest.raises(ModelError, match=r"draft model .*other: its vocabulary .* is not that of"):
        check_parts("triforce", str(tiny_model), "", str(other))


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": null}'])
def test_a_draft_model_s_tokenizer_that_is_damaged_is_named(tiny_model: Path, tmp_path: Path, content: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model / PARTS_FOLDER / DRAFT_FOLDER, other)
    (other / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"other/tokenizer.json has no vocabulary that can be read"):
        check_parts("triforce", str(tiny_model), "", str(other))


@pytest.mark.parametrize("content", [b"", b"123", b"x" * 100, b"\x02" + bytes(7) + b"{}"])
def test_a_damaged_part_is_named(tiny_model: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / HEADS_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=f"{HEADS_FILE}: no safetensors file"):
        check_parts("tokenswift", str(tiny_model), "", str(tmp_path))


def test_a_draft_model_s_folder_is_used(tiny_model: Path, tmp_path: Path) -> None:
    target = TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")
    shutil.copy(tiny_model / PARTS_FOLDER / HEADS_FILE, tmp_path)
    create_drafter("tokenswift", target, free_rows, tmp_path)
    with pytest.raises(ModelError, match="engine tokenswift: no file"):
        create_drafter("tokenswift", target, free_rows, tmp_path / "elsewhere")


def test_a_run_without_its_engine_s_parts_ends_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    jobs, bare = tmp_path / "jobs.jsonl", tmp_path / "bare"
    jobs.write_text('{"custom_id": "a", "prompt": "the quick", "max_tokens": 5}\n')
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns(HEADS_FILE))
    options = ["submit", str(jobs), "--run", str(tmp_path / "run"), "--model", str(bare), "--engine", "tokenswift"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2
    assert "engine tokenswift: no file" in result.output
    assert "starting workers" not in result.output
