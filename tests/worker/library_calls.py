"""Calls of libraries that launch kernels of their own: for doubles of graphs one launch, as those of Triton are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Returned = tuple[Tensor, ...]


class LibraryCall:
    """A stub of such a call; what it returns it allocates."""

    def __init__(self, stub: Callable[..., Returned]) -> None:
        self.stub, self.name = stub, stub.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        return self.stub(*args, **kwargs)
