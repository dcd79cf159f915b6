"""Former GPU defects.

Others are tested in `tests/worker/forward/test_device_rules.py` and `test_cuda_engine.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.cuda.cuda_sampler import SamplingGraphs
from swiftbatch.worker.sampling.cuda.sampling_rows import SamplingRowLayout
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.filters import keep_top_p
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("dtype", "linear"), [(torch.bfloat16, "triton"), (torch.float32, "cublas")])
def test_one_row_and_many_go_through_the_same_products(one_layer_model: Path, dtype: torch.dtype, linear: str) -> None:
    """Other numbers of rows used other kernels, in bfloat16 without padding."""
    target = cuda_target(locate_model(str(one_layer_model)), dtype, num_slots=1, linear=linear)
    assert isinstance(target.forwards, CudaForwards)
    [captured], cache = target.forwards._captured, target.new_cache(100)
    graph = captured.graph
    assert isinstance(graph, CheckedGraph)
    products = [launch for launch in graph.launches if launch[0] in ("aten.mm.out", "multiply_columns")]
    assert products
    for num_nodes in (0, 1, 40):
        target.verify([tree_rows(cache, 5, DraftTree.chain([6] * num_nodes))])  # refuses any other launch
    assert graph.num_replays == 3
    tensors = (
        [part for part in launch if isinstance(part, tuple) and isinstance(part[1], tuple)] for launch in products
    )
    inputs = [parts[0] for parts in tensors]
    assert {shape[0] for _, shape, _ in inputs} == {NUM_ROWS}


class _Sums(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "cumsum" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_off_the_cpu_top_p_sums_whole_numbers() -> None:
    """GPUs add in changing order (see torch's `cumsum`)."""
    with _Sums() as sums:
        keep_top_p(torch.zeros(50, device="meta"), 0.9)
    assert sums.dtypes == [torch.int64]


def test_a_gpu_s_draws_launch_none_of_torch_s_running_sums() -> None:
    graphs = SamplingGraphs(torch.zeros(NUM_ROWS, 50), SamplingRowLayout(2), CheckedGraph)
    for graph in (graphs._plain, graphs._plain_with_candidates, graphs._filtered):
        assert isinstance(graph, CheckedGraph)
        names = [launch[0] for launch in graph.launches]
        assert names
        assert not [name for name in names if "cumsum" in name]
