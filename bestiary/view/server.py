"""The web server of `bestiary view`: routes, files and start."""

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bestiary.utils import safe_files
from bestiary.utils.errors import UserError
from bestiary.utils.html import MIME_TYPES

# NiceGUI reads a folder when it is imported. By default, this is the folder .nicegui in the working directory, which
# may belong to another person. The variable names a folder that does not exist.
os.environ["NICEGUI_STORAGE_PATH"] = os.path.join(tempfile.gettempdir(), f"bestiary-view-{os.getpid()}-unused")

import uvicorn
from fastapi import FastAPI, Response
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.middleware.gzip import GZipMiddleware

from bestiary.evaluation.run_outputs import output_files
from bestiary.view.catalogue import Catalogue
from bestiary.view.page_elements import show_missing
from bestiary.view.pages.game_choice import POLICIES, PlayerQuery
from bestiary.view.pages.player import player_page
from bestiary.view.pages.run import MEDIA_FOLDERS, run_page
from bestiary.view.pages.runs import runs_page
from bestiary.view.pages.study import study_page
from bestiary.view.security import Guard, new_token

HOST = "127.0.0.1"
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#0072B2"/>'
    '<path d="M3 12 6 7l3 3 4-6" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)
MAX_MEDIA_BYTES = 2**28  # maximum size of an image or video that is shown


def add_pages(catalogue: Catalogue) -> None:
    """Register the pages of the application."""

    @ui.page("/")
    def _runs() -> None:
        runs_page(catalogue)

    @ui.page("/run")
    def _run(run: str = "") -> None:
        catalogue.refresh()
        if run in catalogue.runs:
            run_page(catalogue, run)
        else:
            show_missing("run", run)

    @ui.page("/player")
    def _player(
        run: str = "",
        checkpoint: int | None = None,
        env: str | None = None,
        seed: int = 0,
        policy: str = "sampled",
        levels: str | None = None,
        second: str | None = None,
        second_checkpoint: int | None = None,
        recording: str | None = None,
        game: int = 0,
        step: int = 0,
    ) -> None:
        catalogue.refresh()
        if run not in catalogue.runs:
            show_missing("run", run)
            return
        policy = policy if policy in POLICIES else POLICIES[0]
        query = PlayerQuery(
            run=run,
            checkpoint=checkpoint,
            env=env,
            seed=max(0, seed),
            policy=policy,
            levels=levels,
            second=second,
            second_checkpoint=second_checkpoint,
            recording=recording,
            game=max(0, game),
            step=max(0, step),
        )
        player_page(catalogue, query)

    @ui.page("/study")
    def _study(study: str = "") -> None:
        catalogue.refresh()
        if study in catalogue.studies:
            study_page(catalogue, study)
        else:
            show_missing("study", study)

    @nicegui_app.get("/media")
    def _media(run: str, folder: str, file: str) -> Response:
        return media_response(catalogue, run, folder, file)


def media_response(catalogue: Catalogue, run: str, folder: str, name: str) -> Response:
    """Return an image or video of a run. Only regular files that the page of the run lists are sent."""
    if run not in catalogue.runs or folder not in MEDIA_FOLDERS:
        return Response("not found", 404)
    paths = output_files(catalogue.run(run), folder)
    found = [path for path in paths if path.name == name and path.suffix in MIME_TYPES]
    if not found:
        return Response("not found", 404)
    try:
        content = safe_files.read_bytes(found[0], found[0].parent.parent, MAX_MEDIA_BYTES)
    except OSError:
        return Response("not found", 404)
    return Response(content, media_type=MIME_TYPES[found[0].suffix])


def make_app(catalogue: Catalogue, token: str, port: int) -> Any:
    """Return the ASGI application with all checks."""
    # NiceGUI looks at all objects of the process to find its server. Some objects of torch then warn that they are
    # deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui")
    add_pages(catalogue)
    app = FastAPI(openapi_url=None)
    ui.run_with(
        app,
        title="Bestiary",
        favicon=FAVICON,
        dark=None,
        tailwind=False,
        gzip_middleware_factory=None,
        show_welcome_message=False,
        reconnect_timeout=20.0,
    )
    return GZipMiddleware(Guard(app, token, port), minimum_size=1000, compresslevel=5)


def open_socket(port: int | None, default_port: int = 8020) -> socket.socket:
    """Return a socket that listens on the loopback interface. If `port` is None, use the first free port.

    Raise UserError if the port is used already.
    """
    candidates = [port] if port is not None else [*range(default_port, default_port + 20), 0]
    for candidate in candidates:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, candidate))
            # From now on, connections wait until the server runs. So the URL can be printed before the server runs.
            listener.listen()
            return listener
        except OSError:
            listener.close()
    raise UserError(
        f"--port {port}: this port is in use, or needs other permissions; leave out --port to use a free port"
    )


def serve(
    folders: Sequence[Path],
    runs: Sequence[Path],
    *,
    port: int | None,
    trust_code: bool,
    on_start: Callable[[str, int], None],
) -> None:
    """Serve the pages until the process is interrupted. `on_start` is called with the URL and the port."""
    listener = open_socket(port)
    own_port = listener.getsockname()[1]
    token = new_token()
    catalogue = Catalogue(folders, runs, trust_code)
    config = uvicorn.Config(
        make_app(catalogue, token, own_port),
        log_level="warning",
        access_log=False,  # the URL with the token must not be written to a log
        server_header=False,
        ws_max_size=2**20,
        timeout_graceful_shutdown=1,
    )
    on_start(f"http://{HOST}:{own_port}/?token={token}", own_port)
    uvicorn.Server(config).run(sockets=[listener])
    sys.stdout.flush()
