"""Groups of runs and their labels: names by option differences, short legends, `--label`, and links to a run."""

import json
from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.evaluation.learning_curves import group_runs
from bestiary.evaluation.run_groups import config_labels, list_names, short_label, unique_runs
from bestiary.runs.csv_tables import read_rows
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError


def test_option_that_only_some_configs_have_distinguishes_labels() -> None:
    """Labels must be unique, because groups are stored by label."""
    base = {"env": ["atari/Pong"], "memory": "none"}
    others = ({"init_from": "runs/a"}, {"init_from": "runs/b"}, {"memory": "lstm", "memory.size": 9})
    found = config_labels([json.dumps({**base, **other}) for other in ({}, *others)])
    assert found[:3] == [f"memory none, init_from {source}" for source in ("none", "runs/a", "runs/b")]
    assert len(set(found)) == 4


def test_labels_contain_differing_values_with_environments_first() -> None:
    base = {"env": ["toy/catch"], "steps": 10, "memory": "lstm", "memory.hidden": 3, "algo.lr": 0.1}
    others = [{**base, "env": ["toy/chain"], "steps": 20}, {**base, "memory": "none"}, {**base, "memory.hidden": 4}]
    found = config_labels([json.dumps(settings) for settings in (base, *others)])
    assert found == [
        "toy/catch, memory lstm, memory.hidden 3, steps 10",
        "toy/chain, memory lstm, memory.hidden 3, steps 20",
        "toy/catch, memory none, memory.hidden 3, steps 10",
        "toy/catch, memory lstm, memory.hidden 4, steps 10",
    ]


def test_labels_contain_all_differing_options() -> None:
    """A label with only one of them would attribute the whole difference to this option."""
    base = {"env": ["toy/catch"], "algo": "impala", "algo.batch_size": 4, "algo.lr": 0.1, "num_envs": 8}
    other = {**base, "algo.batch_size": 2, "algo.lr": 0.2}
    assert config_labels([json.dumps(base), json.dumps(other)]) == [
        "algo.batch_size 4, algo.lr 0.1",
        "algo.batch_size 2, algo.lr 0.2",
    ]
    ppo = {**base, "algo": "ppo", "algo.lr": 0.2, "num_envs": 16}  # the options of the algorithms are not listed
    assert config_labels([json.dumps(base), json.dumps(ppo)]) == ["algo impala, num_envs 8", "algo ppo, num_envs 16"]


def test_labels_with_many_options_are_abbreviated() -> None:
    assert short_label("algo ppo, torso mlp, memory gru") == "algo ppo, torso mlp, memory gru"
    assert short_label("a 1, b 2, c 3, d 4") == "a 1, b 2, c 3, +1 option"
    assert short_label("a 1, b 2, c 3, d 4, e 5") == "a 1, b 2, c 3, +2 options"
    long_value = short_label("init_from /very/long/folder/name/of/a/project/runs/six-popart")
    assert len(long_value) <= 36
    assert long_value.startswith("init_from")
    assert long_value.endswith("six-popart")


def test_legends_name_the_runs(catch_runs: list[Run]) -> None:
    a, b = group_runs(catch_runs)
    assert a.legend == "algo.lr 0.002 (2 seeds: a1, a2)"
    assert b.legend == "algo.lr 0.0001 (1 seed: b1)"
    assert list_names([Run(Path(f"runs/r{k}")) for k in range(1, 8)]) == "r1 ... r7"


def test_labels_can_be_chosen(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(run.path) for run in catch_runs]
    assert run_command(["compare", *paths, "--label", "fast", "slow, small", "--out", "c.png"]) == 0
    assert {row["group"] for row in read_rows(Path("c.csv"))} == {"fast", "slow, small"}
    assert [group.legend for group in group_runs(catch_runs, names=["fast", "slow"])] == [
        "fast (2 seeds)",
        "slow (1 seed)",
    ]
    assert "slow, small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["one"], "1 name for 2 groups of runs"), (["a", "b", "c"], "1. a1, a2; 2. b1"), (["a", "a"], "the same name")],
)
def test_wrong_labels_are_refused(
    names: list[str], expected: str, catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["compare", *(str(run.path) for run in catch_runs), "--label", *names, "--out", "c.png"]) == 2
    assert expected in capsys.readouterr().err
    with pytest.raises(UserError):
        group_runs(catch_runs, names=names)


def test_link_to_a_run_is_not_a_second_run(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    for name, run in zip(("a1", "a2"), catch_runs[:2], strict=True):
        Path("runs", name).symlink_to(run.path)
    Path("runs/latest").symlink_to("a2")
    assert run_command(["compare", "runs/a1", "runs/a2", "runs/latest", "--out", "c.png"]) == 0
    printed = capsys.readouterr()
    assert "it is used once" in printed.err
    assert "equal" not in printed.err  # no warning about equal seeds
    assert {row["seeds"] for row in read_rows(Path("c.csv"))} <= {"0", "1", "2"}
    assert [run.name for run in unique_runs([*catch_runs, catch_runs[1]])] == ["a1", "a2", "b1"]
