"""A server for one page, on 127.0.0.1 alone: Starlette, served by Uvicorn.

Other programs and other users of this machine can reach a port of it, and so can a web page in the
browser of its user. So every request must have the token, which is in the address that is printed;
a request for another host name is refused, which keeps out names that an attacker points to
127.0.0.1; and the stop button takes a POST from this origin only.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from corefed.base.errors import UserError, install
from corefed.base.shown import say
from corefed.show.live.state import News, of_run, stop_state
from corefed.show.page import charts, html, making
from corefed.show.watch import Reader
from corefed.training import interrupt

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
SCRIPTS = ("charts.js", "tables.js", "live.js")
HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"frame-ancestors 'none'",  # the rest is in the page itself
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",  # the address holds the token
    b"x-content-type-options": b"nosniff",
}
Tell = Callable[[Path], News]


def require_library() -> None:
    """Refuse to go on without the extra."""
    charts.require_library()
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise UserError(f"watch --web needs {module}: {install('web')}.")


def serve(folder: Path, *, port: int = 0, news: Tell = lambda folder: News()) -> int:
    """Serve the page of a run until Ctrl-C; an exit code."""
    require_library()
    import uvicorn  # of an extra

    Reader(folder).look()  # refuses what is no run, before anything is served
    with _listening(port) as door:
        port = door.getsockname()[1]
        token = secrets.token_urlsafe(24)
        config = uvicorn.Config(
            application(folder, token, port, news=news), log_level="warning", access_log=False,
            server_header=False, lifespan="off", ws="none", http="h11", loop="asyncio",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        say(f"watching {folder}: http://{HOST}:{port}/{token}/")
        say("the address is a key: with it, the run can be seen and stopped from this machine")
        say("Ctrl-C leaves the page; the run goes on")
        with suppress(KeyboardInterrupt):  # after Uvicorn has closed what was open
            uvicorn.Server(config).run(sockets=[door])
    return 128 + signal.SIGINT


def _listening(port: int) -> socket.socket:
    door = socket.socket()
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((HOST, port))
    except (OSError, OverflowError) as error:
        door.close()
        reason = getattr(error, "strerror", None) or "it is no port"
        raise UserError(f"Cannot serve at port {port}: {reason}; choose another --port.") from error
    return door


def application(
    folder: Path, token: str, port: int, *, news: Tell = lambda folder: News(),
    clock: Callable[[], float] = time.time,
) -> Starlette:  # fmt: skip
    """The page, its state, the whole report, and the stop button."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Mount, Route

    reader, one_at_a_time = Reader(folder), Lock()
    shell = html.whole(
        "live.html", specs={}, scripts=SCRIPTS, connect="'self'", title=f"Watching {folder.name}"
    )

    def page(request: Request) -> Response:
        return HTMLResponse(shell)

    def state(request: Request) -> Response:
        try:
            with one_at_a_time:
                look = reader.look()
            return JSONResponse(of_run(look, clock(), news(folder)))
        except UserError as error:
            return JSONResponse({"error": str(error)}, status_code=409)

    def report(request: Request) -> Response:
        """Everything there is so far; without single points, wherever the page is shown."""
        try:
            return HTMLResponse(making.text([folder], images=False))
        except UserError as error:
            return JSONResponse({"error": str(error)}, status_code=409)

    def stop(request: Request) -> Response:
        try:
            with one_at_a_time:
                look = reader.look()
            if not stop_state(look)["possible"]:
                reason = "it has finished" if look.finished else "no process is at work in it"
                raise UserError(f"The run is not going on: {reason}.")
            interrupt.ask(folder)
        except UserError as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        except OSError as error:
            said = f"Cannot write {folder / interrupt.STOP}: {error.strerror}."
            return JSONResponse({"error": said}, status_code=409)
        return JSONResponse({"asked": True}, status_code=202)

    routes = [
        Route("/", page),
        Route("/state", state),
        Route("/report", report),
        Route("/stop", stop, methods=["POST"]),
    ]
    guard = Middleware(Guard, token=token, hosts=(f"{HOST}:{port}", f"localhost:{port}"))
    return Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=[guard])


class Guard:
    """Refuses requests without the token, for other hosts, and from other origins."""

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self.app, self.token, self.hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(k, v) for k, v in message.get("headers", []) if k not in HEADERS]
                message = {**message, "headers": [*own, *HEADERS.items()]}
            await send(message)

        if scope["type"] != "http":
            return
        code, words = self.refusal(scope)
        if code:
            await PlainTextResponse(words, status_code=code)(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)

    def refusal(self, scope: Scope) -> tuple[int, str]:
        """Why a request is refused; 0 for one that is not."""
        named = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
        hosts = [value for key, value in named if key == "host"]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 421, "This server answers to its own address only.\n"
        given = scope["path"].split("/")[1]
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return 404, "Nothing here.\n"
        if scope["method"] not in ("GET", "HEAD"):
            about = dict(named)
            origin, site = about.get("origin"), about.get("sec-fetch-site", "same-origin")
            ours = [f"http://{host}" for host in self.hosts]
            if (origin is not None and origin not in ours) or site not in ("same-origin", "none"):
                return 403, "Another page may not ask for this.\n"
        return 0, ""
