"""Start the studio on this machine: loopback only, one folder of runs, nothing else of the disk."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultrascale.specs.errors import SpecError

HOST = "127.0.0.1"
PORT = 8765


def serve(folder: Path, accuracy: Path | None = None, port: int = PORT, show: bool = True) -> None:
    """Until Ctrl-C. Refuses a port that is taken, before anything is started."""
    if not 1 <= port <= 65_535:
        raise SpecError(f"--port is {port} but must be from 1 to 65535, such as {PORT}")
    _free(port)
    try:
        from nicegui import app, core, ui
    except ImportError as error:
        raise SpecError("the studio is built on NiceGUI, which is not installed: pip install 'ultrascale[studio]'") from error
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    pages(folder, accuracy)
    app.on_startup(_warm_up)
    print(f"http://{HOST}:{port} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    # A page elsewhere that resolves its own name to 127.0.0.1 must not reach this one.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    # NiceGUI lets every origin open the page's socket, credentials included: a page elsewhere could then drive this one.
    core.sio.eio.cors_allowed_origins = origins(port)
    ui.run(
        host=HOST,
        port=port,
        title="Ultrascale",
        show=show,
        reload=False,
        show_welcome_message=False,
        favicon="📐",
        tailwind=False,  # page.css has the few rules we use; Tailwind compiles classes in the browser at every change
        gzip_middleware_factory=None,  # on loopback, compressing Plotly's 4.6 MB takes 0.3 s and sending them 0.03 s
    )


async def _warm_up() -> None:
    """Import Plotly and make its first figure, which take half a second, before a page needs one."""
    from nicegui import run

    from ultrascale.figures.runs import accuracy

    await run.io_bound(accuracy, [])


def origins(port: int) -> list[str]:
    """What browsers send as the origin of the studio's own pages: every spelling of the loopback address."""
    return [f"http://{host}:{port}" for host in (HOST, "localhost", "[::1]")]


def pages(folder: Path, accuracy: Path | None) -> None:
    """Register a page per address; what takes long is loaded once the browser is connected."""
    from nicegui import app, ui
    from starlette.requests import Request

    from ultrascale.studio.accuracy import Accuracy, PublishedScores
    from ultrascale.studio.address import PlannerQuery
    from ultrascale.studio.explore import Explore
    from ultrascale.studio.planner import Planner
    from ultrascale.studio.runs import Runs
    from ultrascale.studio.schedules import Schedules

    scores = PublishedScores(accuracy)
    app.on_startup(scores.start)
    built: dict[str, Callable[[PlannerQuery, dict[str, str]], Any]] = {
        "/": lambda ask, query: Planner(ask),
        "/explore": lambda ask, query: Explore(ask),
        "/schedules": Schedules,
        "/runs": lambda ask, query: Runs(ask, query, folder),
        "/accuracy": lambda ask, query: Accuracy(ask, scores),
    }

    def register(path: str, build: Callable[[PlannerQuery, dict[str, str]], Any]) -> None:
        async def show(request: Request) -> None:
            query = dict(request.query_params)
            page = build(PlannerQuery.from_query(query), query)
            if hasattr(page, "load"):
                await ui.context.client.connected()
                with page.frame.show_errors():
                    await page.load()

        # Annotations are texts here (from __future__), which FastAPI cannot look up in a function's own names.
        show.__annotations__["request"] = Request
        ui.page(path, title=f"Ultrascale · {path.strip('/') or 'plan'}")(show)

    for path, build in built.items():
        register(path, build)


def _free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SpecError(f"port {port} is taken, perhaps by another studio: try --port {port + 1}") from None
            raise SpecError(f"port {port} cannot be used ({error.strerror}): try --port {PORT}") from None
