"""Origin of each value of a config, and the annotated TOML text of --dry-run."""

import tomllib

import pytest

from bestiary.cli.main import run_command
from bestiary.config.origins import annotated_toml
from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten
from bestiary.runs.option_sources import merge_sources
from bestiary.runs.run import Run


def origins_of(**options):
    config = resolve(*merge_sources(options))
    assert flatten(config.tables()).keys() <= config.origins.keys()
    return config.origins


def test_one_value_of_each_origin(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("seed = 5\n[algo]\nentropy-coef = 0.02\n")
    origins = origins_of(env="toy/catch", preset="hello", config=str(file), lr=0.1, torso="mlp")
    assert origins["env"] == origins["algo.lr"] == origins["torso"] == "given"
    assert origins["steps"] == "preset hello"
    assert origins["seed"] == origins["algo.entropy_coef"] == f"config {file}"
    assert origins["algo.discount"] == origins["memory"] == "default"
    assert origins["max_lag"] == origins["algo.reward_clipping"] == "derived"


def test_values_of_a_warm_start_come_from_the_run(catch_runs: list[Run]):
    path = str(catch_runs[0].path)
    origins = origins_of(init_from=path)
    assert origins["env"] == origins["torso"] == origins["torso.width"] == f"run {path}"
    assert origins["init_from"] == "given"
    assert origins["seed"] == "default"


@pytest.mark.parametrize(
    ("options", "key", "origin"),
    [
        ({}, "torso", "derived"),
        ({"torso": "auto"}, "torso", "derived"),
        ({"critic": "popart"}, "critic", "given"),
        ({"preset": "popart-six"}, "critic", "preset popart-six"),
        ({"preset": "popart-six", "critic": "shared"}, "critic", "given"),
        ({"algo.reward_clipping": "auto"}, "algo.reward_clipping", "derived"),
        ({"lr": 0.1, "algo.lr": 0.2}, "algo.lr", "given"),
        ({"frame_stack": 1}, "env.frame_stack", "given"),
        ({"gray": False}, "env.frame_stack", "default"),
        ({"agent": "iam", "env": "warehouse", "algo": "ppo"}, "num_envs", "default"),
        ({"steps": "5M"}, "steps", "given"),
        ({"steps": "none"}, "steps", "derived"),
        ({"env": ["atari/Pong", "atari/Breakout"]}, "env.full_actions", "derived"),
        ({"env": ["atari/Pong", "atari/AirRaid"]}, "algo.batch_size", "derived"),
        ({"agent": "iam", "env": "warehouse"}, "memory", "default"),
        ({"agent": "iam", "env": "warehouse"}, "agent", "given"),
    ],
)
def test_origin_of(options, key, origin):
    assert origins_of(**{"env": "atari/Pong", **options})[key] == origin


def test_reward_with_a_relative_path_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def bonus(measures):\n    return measures['reward'] * 2\n")
    assert origins_of(env="toy/catch", reward="mine.py:bonus")["reward"] == "given"


def test_annotated_toml_is_the_config_with_comments():
    config = resolve({"env": "toy/catch", "torso.width": 8}, {"env": "config odd\nname"})
    text = annotated_toml(config.to_toml(), config.origins)
    assert tomllib.loads(text) == tomllib.loads(config.to_toml())
    lines = {line.split(" = ")[0]: line for line in text.partition("[torso]")[2].splitlines()}
    assert lines["width"].startswith("width = 8 ")
    assert lines["width"].endswith("  # given")
    assert "config odd?name" in text


def test_dry_run_shows_origins(capsys):
    words = ["train", "toy/catch", "--preset", "hello", "--seed", "3", "--dry-run"]
    assert run_command(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "=", "3", "#", "given"] in lines
    assert ["steps", "=", "120000", "#", "preset", "hello"] in lines
    assert ["max_lag", "=", "16", "#", "derived"] in lines
    assert ["discount", "=", "0.99", "#", "default"] in lines
