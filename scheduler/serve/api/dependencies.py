"""Dependencies of routes: the service, the request's owner, its idempotency key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from swiftbatch.scheduler.serve.client_errors import RefusedError
from swiftbatch.scheduler.serve.service import Service

MAX_IDEMPOTENCY_KEY = 255


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def served(request: Request) -> Service:  # `async` saves a thread, also below
    return service_of(request)


async def owner_of(request: Request) -> str | None:
    """Return the owner that access control found; None without keys."""
    owner: str | None = request.state.owner
    return owner


async def key_of(request: Request) -> str | None:
    """Return a request's idempotency key, if any. Raises RefusedError."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_IDEMPOTENCY_KEY:
        raise RefusedError(
            f"Idempotency-Key: found {len(key):,} characters, expected 1 to {MAX_IDEMPOTENCY_KEY}",
            param="Idempotency-Key",
        )
    return key


Served = Annotated[Service, Depends(served)]
Owner = Annotated[str | None, Depends(owner_of)]
Key = Annotated[str | None, Depends(key_of)]
