"""Command `view`: a local web application that shows runs, studies and games."""

import importlib.util
from pathlib import Path

from bestiary.cli.arguments import Parser, add_trust_code, parse_number
from bestiary.runs import zoo
from bestiary.runs.run import open_run
from bestiary.utils.console import note, print_line
from bestiary.utils.errors import UserError

DEFAULT_FOLDER = Path("runs")


def view(argv: list[str]) -> None:
    """Serve the pages until Ctrl-C."""
    parser = Parser(
        "view",
        "Show runs, studies and the games of agents in the web browser. The pages are served on this machine only, and "
        "follow running trainings. Open the URL that the command prints; Ctrl-C ends the command.",
    )
    parser.add_argument(
        "paths",
        metavar="FOLDER|RUN",
        nargs="*",
        help="folders whose runs and studies are shown, runs, or agents of the zoo (default: runs, and all agents of "
        "the zoo)",
    )
    parser.add_argument("--port", metavar="N", help="port of the server (default: the first free port from 8020 on)")
    parser.add_argument("--open", action="store_true", help="open the page in the default web browser")
    add_trust_code(parser)
    a = parser.parse_strictly(argv)
    port = None if a.port is None else parse_number("--port", int, {"low": 1, "high": 65_535}, a.port)
    folders, runs = find_paths(a.paths)
    if importlib.util.find_spec("nicegui") is None:
        raise UserError("bestiary view needs NiceGUI, which is not installed; run: pip install 'bestiary[view]'")

    from bestiary.view.server import serve

    def announce(url: str, used_port: int) -> None:
        print_line(f"open {url}")
        note(
            f"the page is visible on this machine only; from another machine: ssh -L {used_port}:127.0.0.1:{used_port}"
        )
        if a.open:
            import webbrowser

            webbrowser.open(url)

    serve(folders, runs, port=port, trust_code=a.trust_code, on_start=announce)


def find_paths(words: list[str]) -> tuple[list[Path], list[Path]]:
    """Return the folders and the runs that the user named. Raise UserError if one of them does not exist."""
    if not words:
        return [DEFAULT_FOLDER], [zoo.ZOO_FOLDER / Path(name).name for name in zoo.agent_names()]
    folders, runs = [], []
    for word in dict.fromkeys(words):
        path = Path(word).expanduser()
        if path.is_dir() and not (path / "config.toml").is_file():
            folders.append(path)
        else:
            runs.append(open_run(word).path)
    return folders, runs
