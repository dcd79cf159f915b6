"""What every route needs: the service, and whose request it is. Without `async` each would take a thread."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from scheduler.serve.service import Service


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def owner_of(request: Request) -> str | None:
    """Whose files and batches a request may see, as the gate has found: without keys those of nobody in particular."""
    owner: str | None = request.state.owner
    return owner


Served = Annotated[Service, Depends(service_of)]
Owner = Annotated[str | None, Depends(owner_of)]
