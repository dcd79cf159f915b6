"""The route class of pages: strict headers, cookies and readable errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.serve.api.dependencies import service_of
from swiftbatch.scheduler.serve.page.login_sessions import LoginNeededError, keep_session
from swiftbatch.scheduler.serve.page.rendering import page_response

UPLOAD_PATH = "/"
ASSETS = {"/page.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}
PATHS = frozenset({UPLOAD_PATH, "/login", "/logout", *ASSETS})
BATCH_PATHS = "/batches/"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Answer = Callable[[Request], Coroutine[Any, Any, Response]]


def is_of_page(path: str) -> bool:
    return path in PATHS or path.startswith(BATCH_PATHS)


class PageRoute(APIRoute):
    def get_route_handler(self) -> Answer:
        answer = super().get_route_handler()

        async def answer_strictly(request: Request) -> Response:
            try:
                response = await answer(request)
            except LoginNeededError:
                response = RedirectResponse("/login", 303)
            except (UserError, RequestValidationError, HTTPException) as error:
                response = _problem(request, error)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            if (session_id := getattr(request.state, "new_session_id", None)) is not None:
                keep_session(request, response, session_id)
            return response

        return answer_strictly


def _problem(request: Request, error: Exception) -> Response:
    """Return an error page."""
    if isinstance(error, UserError):
        refusal = service_of(request).refusal(error)
        status, problem = refusal.status, str(refusal)
    elif isinstance(error, HTTPException):
        status, problem = error.status_code, str(error.detail)
    else:
        assert isinstance(error, RequestValidationError)
        [first, *_] = error.errors()
        status, problem = 400, f"{first['loc'][-1]}: {first['msg']}"
    return page_response("problem", {"problem": problem}, status)
