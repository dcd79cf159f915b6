"""Library calls that launch kernels, one launch each for graph doubles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Returned = tuple[Tensor, ...]


class LibraryCall:
    def __init__(self, stub: Callable[..., Returned]) -> None:
        self.stub, self.name = stub, stub.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        return self.stub(*args, **kwargs)
