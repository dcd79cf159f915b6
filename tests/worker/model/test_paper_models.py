"""The models that the papers of our engines use, as they were published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.text_config import text_view
from tests.worker.model.paper_configs import OTHERS, PAPERS, pickle_weights, publish


@pytest.mark.parametrize("num_shards", [0, 1, 2])
@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_model_runs_in_the_kernels_and_chooses_as_transformers_does(
    name: str, num_shards: int, tmp_path: Path
) -> None:
    """Without shards, weights are safetensors."""
    publish(name, tmp_path)
    if num_shards:
        pickle_weights(tmp_path, num_shards)
    told = inspect_model(str(tmp_path))
    assert told.cpu is not None
    assert told.cuda is not None
    assert (told.refusal, told.cpu.name, told.cuda.name) == (None, "kernels", "kernels")
    target = TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
    assert isinstance(target.forwards, NativeForwards)
    found = compare(target, num_rows=200)
    assert (found.agrees, found.num_rows, found.num_same_choices) == (True, 200, 200), found


@pytest.mark.parametrize("name", PAPERS)
def test_what_a_config_leaves_out_is_what_its_class_has(name: str) -> None:
    view, theirs = text_view(PAPERS[name]), AutoConfig.for_model(**json.loads(json.dumps(PAPERS[name])))
    assert view["num_key_value_heads"] == theirs.num_key_value_heads
    assert view["max_position_embeddings"] == theirs.max_position_embeddings
    said = view.get("rope_scaling") or view.get("rope_parameters") or {}
    assert said.get("rope_theta", view["rope_theta"]) == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("what", OTHERS)
def test_other_angles_are_refused_in_a_line(what: str, tmp_path: Path) -> None:
    config, words = OTHERS[what]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\A.*\Z") as caught:
        locate_model(str(tmp_path))
    assert words in str(caught.value)
    assert words in str(inspect_model(str(tmp_path)).refusal)
