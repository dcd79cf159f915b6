"""What every route needs: the service, and whose request it is."""

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
    """Whose files and batches a request may see, as the gate has found: without keys those of nobody in particular."""
    owner: str | None = request.state.owner
    return owner


Served = Annotated[Service, Depends(served)]
Owner = Annotated[str | None, Depends(owner_of)]
