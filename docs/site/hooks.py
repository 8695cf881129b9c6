"""Hooks of MkDocs: generate the reference pages and notebooks, and adapt links to files outside of docs/."""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}  # page of the site: file
# MkDocs loads this file without its folder in sys.path, so the module next to it is loaded by its path.
_SPEC = importlib.util.spec_from_file_location("bestiary_notebooks", Path(__file__).with_name("notebooks.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
NOTEBOOKS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(NOTEBOOKS)
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated from the code, and the pages from the root folder."""
    pages = {
        "reference/cli.md": command_line_page(),
        "reference/options.md": options_page(),
        "reference/python.md": python_page(),
        **{page: (ROOT / name).read_text() for page, name in ROOT_PAGES.items()},
        **{f"notebooks/{path.stem}.md": notebook_page(path) for path in NOTEBOOKS.FOLDER.glob("*.ipynb")},
    }
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files that are not part of the site.

    A link to a page in the root folder becomes a link to its copy. A link to a source file becomes its text.
    """
    source = Path("docs", page.file.src_uri)
    if page.file.src_uri in ROOT_PAGES:
        source = Path(ROOT_PAGES[page.file.src_uri])
    depth = page.file.src_uri.count("/")
    copies = {name: copy for copy, name in ROOT_PAGES.items()} | {"README.md": "index.md"}

    def adapt(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if ":" in target:
            return match.group()
        path = (ROOT / source.parent / target).resolve()
        if not path.is_relative_to(ROOT):
            return match.group()
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("docs/notebooks/") and source.parent.name != "notebooks":
            name = f"{name.removesuffix('.ipynb')}.md"  # the page that `notebook_page` generates
        if name.startswith("docs/") and not name.startswith("docs/site/"):
            return f"[{text}]({'../' * depth}{name.removeprefix('docs/')}{anchor})"
        return f"[{text}]({'../' * depth}{copies[name]}{anchor})" if name in copies else text

    return LINK.sub(adapt, markdown)


def notebook_page(path: Path) -> str:
    """Return the page of a notebook, with a link to the notebook itself below the title."""
    title, _, text = NOTEBOOKS.to_markdown(json.loads(path.read_text())).partition("\n")
    return f"{title}\n\n[Download this notebook]({path.name}).\n{text}"


def command_line_page() -> str:
    """Return the page with the help text of each command."""
    from bestiary.cli.main import USAGE

    parts = [
        "# Command line",
        "This page shows the output of `bestiary --help` and of `bestiary COMMAND --help`. The options of `train` "
        "depend on the chosen environment and components; [configuration](options.md) lists all of them.",
        _text_block(USAGE),
    ]
    for name, text in _help_texts():
        parts += [f"## {name}", _text_block(text)]
    return "\n\n".join(parts) + "\n"


def _help_texts() -> Iterator[tuple[str, str]]:
    """Yield each command and its help text."""
    from bestiary.cli.arguments import capture_parser
    from bestiary.cli.look import TOOLS
    from bestiary.cli.main import COMMANDS

    for name, (module, function) in COMMANDS.items():
        run = getattr(importlib.import_module(f"bestiary.cli.{module}"), function)
        if name == "look":
            for tool, (run_tool, _) in TOOLS.items():
                yield f"look {tool}", capture_parser(run_tool, []).format_help()
        else:
            yield name, capture_parser(run, []).format_help()


def _text_block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def options_page() -> str:
    """Return the page with the options of a training, of all environments and of all components."""
    from bestiary import envs
    from bestiary.cli.completable import FAMILY_EXAMPLES
    from bestiary.config.component_kinds import COMPONENT_TITLES
    from bestiary.config.components import REGISTRIES
    from bestiary.config.training_options import Training
    from bestiary.loggers import LOGGERS
    from bestiary.utils.options import options_class

    parts = [
        "# Configuration",
        "The options of a run are flags of `bestiary train`, keywords of `bestiary.train` and keys of TOML files. The "
        "option `memory.hidden` is the flag `--memory.hidden`, and in TOML the key `hidden` of the table `[memory]`. "
        "Options without a component prefix (`--lr`) also belong to the component of their section. Environments and "
        "agents can change defaults; `bestiary train ENV ... --dry-run` prints the values of a run and their origins.",
        "## Training",
        _option_table("", Training),
    ]
    parts.append("## Environments")
    for name in FAMILY_EXAMPLES:
        parts += [f"### {name.split('/')[0]}", _option_table("env", envs.lookup_env(name).options)]
    for kind, registry in REGISTRIES.items():
        title = COMPONENT_TITLES[kind]
        parts.append(f"## {title[0].upper()}{title[1:]} (`--{kind}`)")
        for name, component in registry.items():
            parts += [f"### {kind} {name}", _option_table(kind, options_class(component))]
    parts.append("## Loggers (`--logger`)")
    for name, logger in LOGGERS.items():
        parts += [f"### logger {name}", _option_table("logger", options_class(logger))]
    return "\n\n".join(parts) + "\n"


def _option_table(kind: str, options: type) -> str:
    """Return a Markdown table with flag, default and meaning of each option of an options class."""
    from bestiary.cli.arguments import Parser
    from bestiary.cli.option_flags import add_option_flags

    parser = Parser("")
    add_option_flags(parser, options, kind)
    rows = ["| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.option_strings[0] in ("-h", "--help") or action.help == "==SUPPRESS==":
            continue
        meaning = str(action.help).replace("%%", "%").replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}` | {meaning} |")
    return "\n".join(rows) if len(rows) > 2 else "No options."


def python_page() -> str:
    """Return the page about the Python API. The plug-in mkdocstrings replaces each `:::` line by documentation."""
    import bestiary.api
    import bestiary.testing

    parts = [
        "# Python API",
        "The functions of this page do the same as the commands of the command line. A mistake of the user raises "
        "`bestiary.UserError`; its message has one line per problem.",
        "## Runs",
        *(f"::: bestiary.api.{name}\n    options:\n      heading_level: 3" for name in bestiary.api.__all__),
        "## Checkers for your own components",
        *(f"::: bestiary.testing.{name}\n    options:\n      heading_level: 3" for name in bestiary.testing.__all__),
    ]
    return "\n\n".join(parts) + "\n"
