"""The files that the pages load: one style, one script, one icon."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from swiftbatch.scheduler.serve.page.page_route import PageRoute
from swiftbatch.scheduler.serve.page.paths import ASSETS
from swiftbatch.scheduler.serve.page.rendering import FOLDER

router = APIRouter(route_class=PageRoute)


def asset(request: Request) -> FileResponse:
    path = request.url.path
    return FileResponse(FOLDER / "assets" / path.removeprefix("/"), media_type=ASSETS[path])


for path in ASSETS:
    router.add_api_route(path, asset, methods=["GET"])
