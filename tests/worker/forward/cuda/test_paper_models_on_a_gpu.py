"""The models that the papers of our engines use, in the kernels of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.model.paper_configs import PAPERS, pickle_weights, publish

pytestmark = pytest.mark.long


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PAPERS)
def test_choices_from_pickled_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    publish(name, tmp_path)
    pickle_weights(tmp_path)
    found = compare(cuda_target(locate_model(str(tmp_path)), torch.float32, 1, 250, "cublas"), num_rows=200)
    assert (found.agrees, found.num_rows, found.num_same_choices) == (True, 200, 200), found
