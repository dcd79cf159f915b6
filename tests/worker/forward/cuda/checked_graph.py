"""A CUDA graph's rules on a CPU: every replay launches what was captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from swiftbatch.worker.kernels.cuda.cuda_graph import Work
from tests.worker.library_calls import LibraryCall, Returned

Launch = tuple[Any, ...]  # a kernel's or operation's name and arguments, tensors by address


class CaptureError(Exception):
    """Work that no graph can hold, or that a replay would do differently."""


class _Recording(TorchDispatchMode):
    """Records launches; refuses allocations and waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.is_interpreting = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.is_interpreting and not func.is_view:
            if "local_scalar_dense" in str(func):
                raise CaptureError(f"{func} asks for a number on the host")
            if any(returned.alias_info is None for returned in func._schema.returns):
                raise CaptureError(f"{func} allocates what it returns")
            self.launches.append((str(func), *_places(args), *_places((kwargs or {}).values())))
        return func(*args, **(kwargs or {}))


class CheckedGraph:
    """`made` has all graphs with their launches."""

    made: list[CheckedGraph]

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        # by library call: its results, which its next call must return in the same place
        self._pool: dict[str, Returned] = {}
        work()  # as a warm-up does
        self.launches = self._run(is_capture=True)
        self.num_replays = 0

    def replay(self) -> None:
        launches = self._run()
        if launches != self.launches:
            different = next(pair for pair in zip(launches, self.launches, strict=False) if pair[0] != pair[1])
            raise CaptureError(f"launched {different[0]} where the graph has {different[1]}")
        self.num_replays += 1

    def _run(self, is_capture: bool = False) -> list[Launch]:
        """A capture runs no kernel."""
        recording, launch = _Recording(), GridExecutor.__call__

        def noted(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            name = executor.fn.__name__
            recording.launches.append((name, executor.grid, *_places(args), *_places(kwargs.values())))
            recording.is_interpreting = True  # tensors are read and written beside the launches
            if not is_capture:
                launch(executor, *args, **kwargs)
            recording.is_interpreting = False

        def returned_in_place(call: LibraryCall, *args: Any, **kwargs: Any) -> Returned:
            recording.launches.append((call.name, *_places(args), *_places(kwargs.values())))
            recording.is_interpreting = True
            returned = call.stub(*args, **kwargs)
            kept = self._pool.setdefault(call.name, returned)
            for old, new in zip(kept, returned, strict=True):
                old.copy_(new)
            recording.is_interpreting = False
            return kept

        with pytest.MonkeyPatch.context() as patches, recording:
            patches.setattr(GridExecutor, "__call__", noted)
            patches.setattr(LibraryCall, "__call__", returned_in_place)
            self._work()
        return recording.launches


def _places(values: Any) -> list[Any]:
    return [
        (value.data_ptr(), tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else repr(value)
        for value in values
    ]
