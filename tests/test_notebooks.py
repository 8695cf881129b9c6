"""The notebooks of the documentation run (slow), and the site can show their stored outputs."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "site"))
import notebooks  # type: ignore[import-not-found]

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in PATHS] == ["first-agent", "own-components"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_shown_without_control_characters(path: Path) -> None:
    notebook = json.loads(path.read_text())
    text = notebooks.to_markdown(notebook)
    assert "\x1b" not in text
    assert "Traceback" not in text
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"], cell["source"]
            assert all(output["output_type"] != "error" for output in cell["outputs"])


def test_the_first_notebook_shows_figures_and_tables() -> None:
    text = notebooks.to_markdown(json.loads((notebooks.FOLDER / "first-agent.ipynb").read_text()))
    assert text.count("data:image/png") == 2  # learning curve and saliency
    assert text.count("data:image/gif") == 1
    assert text.count("<table>") == 2  # run and evaluation


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_the_stored_result(path: Path, tmp_path: Path) -> None:
    executed = notebooks.execute(path, str(tmp_path))
    printed = [output["text"] for cell in executed.cells for output in cell.get("outputs", ()) if "text" in output]
    if path.stem == "own-components":
        assert "true return 1.00" in printed[-1].splitlines()[-1]
    else:
        assert any(line.strip() == "1.0" for text in printed for line in text.splitlines())
