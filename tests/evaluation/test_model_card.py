"""`bestiary card` writes a folder that can be published and used as it is."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.config import Config
from bestiary.runs.run import Run


def test_the_folder_of_a_card_works_anywhere(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = catch_runs[0]
    assert run_command(["card", str(run.path), "--out", "catch", "--episodes", "40", "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == "card: catch/README.md"
    text = Path("catch/README.md").read_text()

    _, front, body = text.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "bestiary"
    assert "reinforcement-learning" in metadata["tags"]
    (result,) = metadata["model-index"][0]["results"]
    evaluation = json.loads(Path("catch/evaluation.json").read_text())
    statistics = evaluation["statistics"]["game_return"]
    assert result["dataset"]["name"] == "toy/catch"
    assert result["metrics"][0]["value"] == f"{statistics['mean']:.2f} +/- {statistics['sd']:.2f}"
    row = next(line for line in body.splitlines() if "| game return |" in line)
    assert row.split(" | ")[2:5] == ["40", f"{statistics['mean']:.2f}", row.split(" | ")[4]]
    assert " to " in row.split(" | ")[4]
    assert tomllib.loads(body.split("```toml\n")[1].split("```")[0]) == tomllib.loads(
        (run.path / "config.toml").read_text()
    )
    assert Path("catch/replay.mp4").stat().st_size > 1_000

    # The commands in the card give the same result in a copy of the folder at another place.
    Path("elsewhere").mkdir()
    shutil.move("catch", "elsewhere/catch")
    command = re.search(r"^bestiary (eval catch .*)$", body, re.M)
    assert command is not None
    assert run_command(["eval", "elsewhere/catch", *command[1].split()[2:]]) == 0
    (again,) = Path("elsewhere/catch/evaluations").glob("*.json")
    assert json.loads(again.read_text())["statistics"] == evaluation["statistics"]
    program = body.split("```python\n")[1].split("```")[0].replace('load("catch")', 'load("elsewhere/catch")')
    variables: dict[str, object] = {}
    exec(program.replace("1000", "20"), variables)
    assert isinstance(variables["run"], bestiary.Run)


def test_a_card_of_a_zoo_agent_leaves_the_package_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["card", "zoo/warehouse-iam", "--episodes", "2", "--no-video"]) == 0
    card = Path(capsys.readouterr().out.removeprefix("card: ").strip())
    assert card == Path("runs/zoo-warehouse-iam/cards/000004001792/README.md")
    assert "<video" not in card.read_text()
    assert not list(card.parent.glob("*.mp4"))


def test_only_another_card_is_overwritten(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["card", str(catch_runs[1].path), "--out", "folder", "--episodes", "2", "--no-video"]
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    assert run_command([*command, "--overwrite"]) == 2
    assert "no model card" in capsys.readouterr().err
    assert Path("folder/notes.txt").read_text() == "mine"
    shutil.rmtree("folder")
    assert run_command(command) == 0
    assert run_command(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run_command([*command, "--overwrite"]) == 0
    assert run_command([*command[:3], "missing/folder"]) == 2
    assert not list(Path().glob("*.partial"))


PLUGIN = """
import torch.nn as nn
class Plain(nn.Module):
    def __init__(self, spec):
        super().__init__()
        (observation,) = spec.values()
        size = 1
        for length in observation.shape:
            size *= length
        self.layer = nn.Linear(size, 8)
        self.output_size = 8
    def forward(self, observation):
        (x,) = observation.values()
        return self.layer(x.flatten(1).float())
"""


def test_a_card_contains_the_plug_ins_of_the_agent() -> None:
    Path("plain.py").write_text(PLUGIN)
    bestiary.train("toy/catch", run_dir="r", runtime="serial", steps=500, torso="plain.py:Plain")
    assert run_command(["card", "r", "--out", "card", "--episodes", "2", "--no-video"]) == 0
    assert [path.read_text() for path in Path("card/plugins").rglob("plain.py")] == [PLUGIN]
    assert "--trust-code" in Path("card/README.md").read_text()


def test_a_card_with_plug_ins_works_on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The files of a card contain no path of the machine, and its commands work without the original files."""
    author = tmp_path / "author"
    author.mkdir()
    (author / "plain.py").write_text(PLUGIN)
    (author / "reward.py").write_text("def double(measures):\n    return 2 * measures['reward']\n")
    options: dict[str, Any] = {"torso": f"{author}/plain.py:Plain", "reward": f"{author}/reward.py:double"}
    bestiary.train("toy/catch", run_dir="r", runtime="serial", steps=500, **options)
    assert run_command(["card", "r", "--out", "card", "--episodes", "2", "--no-video"]) == 0
    for path in Path("card").rglob("*"):
        assert path.is_dir() or str(author).encode() not in path.read_bytes(), path
    assert "torso `plain.py:Plain`" in Path("card/README.md").read_text()

    shutil.rmtree(author)
    Path("elsewhere").mkdir()
    shutil.move("card", "elsewhere/card")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another-user"))
    assert run_command(["eval", "elsewhere/card", "--episodes", "2"]) == 2
    assert run_command(["eval", "elsewhere/card", "--episodes", "2", "--trust-code"]) == 0
    assert run_command(["train", "--config", "elsewhere/card/config.toml", "--run-dir", "again"]) == 0
    again = bestiary.load("again").config
    assert str(again.components["torso"].name).endswith("card/plugins/" + _copy(again, "plain.py") + ":Plain")


def _copy(config: Config, name: str) -> str:
    """Return the path of the copy of a plug-in in the folder of all copies."""
    (sha256,) = (sha256 for file, sha256 in config.plugin_hashes.items() if file.endswith(name))
    return f"{sha256[:8]}/{name}"


def test_the_config_of_a_run_uses_the_copies_of_changed_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("plain.py").write_text(PLUGIN)
    bestiary.train("toy/catch", run_dir="r", runtime="serial", steps=500, torso="plain.py:Plain")
    Path("plain.py").write_text(PLUGIN.replace("8", "16"))
    assert run_command(["train", "--config", "r/config.toml", "--run-dir", "again"]) == 0
    old, new = (bestiary.load(name).agent().state_dict() for name in ("r", "again"))
    assert {name: value.shape for name, value in old.items()} == {name: value.shape for name, value in new.items()}

    # A copy that was changed is refused.
    (copy,) = Path("r/plugins").rglob("plain.py")
    copy.write_text("raise SystemExit('executed')")
    assert run_command(["train", "--config", "r/config.toml", "--run-dir", "third", "--trust-code"]) == 2


def test_texts_of_the_run_do_not_become_markdown(catch_runs: list[Run]) -> None:
    name = "a`b|<img src=x>[c](d)"
    shutil.copytree(catch_runs[0].path, name, symlinks=True)
    config = Path(name) / "config.toml"
    config.write_text(f"{config.read_text()}\n# ```\n# <script>x</script>\n# \u202e````\n")
    assert run_command(["card", name, "--out", "card", "--episodes", "2", "--no-video"]) == 0
    lines = Path("card/README.md").read_text().splitlines()
    assert "# a\\`b\\|\\<img src=x\\>\\[c\\](d)" in lines
    assert lines[-1] == "`````"
    start = lines.index("`````toml")
    assert "# <script>x</script>" in lines[start:]
    assert lines[-2] == "# \\u202e````"
    yaml.safe_load(Path("card/README.md").read_text().split("---\n", 2)[1])
