"""The dependencies of every route: the service, and the owner of the request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from swiftbatch.scheduler.serve.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def served(request: Request) -> Service:  # without `async` it would take a thread, as below
    return service_of(request)


async def owner_of(request: Request) -> str | None:
    """The owner whose files and batches a request may see, as the gate found it; without keys, nobody in particular."""
    owner: str | None = request.state.owner
    return owner


Served = Annotated[Service, Depends(served)]
Owner = Annotated[str | None, Depends(owner_of)]
