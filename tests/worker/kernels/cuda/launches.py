"""A forward's launches and torch operations, without running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.worker.library_calls import LibraryCall, Returned


class Launches(TorchDispatchMode):
    """Records kernels and torch operations without views."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_in_library = False

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self.names.append(executor.fn.__name__)  # not run: the interpreter is slow, and no launch depends on it

        def call_library(call: LibraryCall, *args: Any, **kwargs: Any) -> Returned:
            self.names.append(call.name)
            self._is_in_library = True
            returned = call.stub(*args, **kwargs)
            self._is_in_library = False
            return returned

        patches.setattr(GridExecutor, "__call__", launch)
        patches.setattr(LibraryCall, "__call__", call_library)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_in_library and not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def launched(patches: pytest.MonkeyPatch, forward: Callable[[], None]) -> list[str]:
    with Launches(patches) as launches:
        forward()
    return launches.names
