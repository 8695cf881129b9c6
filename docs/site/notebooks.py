"""Notebooks of the site: execute them, and convert them to Markdown.

    python docs/site/notebooks.py        # execute docs/notebooks/*.ipynb and store their outputs

The site shows the stored outputs. `tests/test_notebooks.py` executes the notebooks again.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
ESCAPE_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT = 1_800  # seconds per cell
PROGRESS_BAR = "\u2501" * 10  # horizontal lines, of which progress bars consist
IMAGES = ("image/png", "image/gif")


def execute(path: Path, folder: str) -> Any:
    """Execute a notebook in a folder and return it with its outputs. Raise an exception if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": search_path}  # so that `!bestiary` is the command of this environment
    client = NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": folder}})
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata = {}  # without the times at which the cells were executed
        if cell.cell_type == "code":
            cell.outputs = tidy_outputs(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = output.text.replace(f"{folder}/", "")
    return notebook


def tidy_outputs(outputs: list[Any]) -> list[Any]:
    """Join the printed text of a cell, and remove progress bars and colours."""
    import nbformat

    text, others = "", []
    for output in outputs:
        data = output.get("data", {})
        if output["output_type"] == "stream":
            text += output["text"]
        elif output["output_type"] == "display_data" and "text/plain" in data and not set(IMAGES) & set(data):
            text += data["text/plain"]  # a line of progress
        else:
            others.append(output)
    lines = [line.split("\r")[-1] for line in ESCAPE_CODES.sub("", text).replace("\r\n", "\n").split("\n")]
    printed = "\n".join(line.rstrip() for line in lines if line.strip() and PROGRESS_BAR not in line)
    if printed:
        others.insert(0, nbformat.v4.new_output("stream", name="stdout", text=f"{printed}\n"))
    return others


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown. Images are part of the text, as data URLs."""
    parts = []
    for cell in notebook["cells"]:
        source = _joined(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{_joined(output['text']).rstrip()}\n```"
    data = output["data"]
    for kind in IMAGES:
        if kind in data:
            return f'<img alt="output of the cell" src="data:{kind};base64,{"".join(_joined(data[kind]).split())}">'
    if "text/html" in data:
        return _joined(data["text/html"])
    return f"```text\n{_joined(data['text/plain'])}\n```"


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def main() -> None:
    import nbformat

    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, folder), path)
        print(f"{path.name}: {len(to_markdown(json.loads(path.read_text())))} characters of Markdown")


if __name__ == "__main__":
    main()
