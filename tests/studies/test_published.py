"""The published experiments that come with the package: their files, and a very short run of each."""

from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.studies.study import read_study
from bestiary.studies.study_file import published_studies, read_study_file
from bestiary.studies.trial import make_trials

NAMES = list(published_studies())


def test_each_published_experiment_is_listed_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(NAMES) >= 8
    assert run_command(["list", "studies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split()) > 4 for line in lines)
    assert run_command(["study", "published/six-gmes", "--dry-run"]) == 2
    assert "did you mean published/six-games" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_published_files_have_scales_and_sources(name: str) -> None:
    file = read_study_file(Path(name))
    assert set(file.tables["scale"]) == {"small", "tiny"}
    assert file.tables["name"] == name.removeprefix("published/")
    for published in file.tables.get("published", []):
        assert published["source"]
    assert "Source: " in file.text
    assert f"bestiary study {name} --scale small" in file.text


@pytest.mark.parametrize("name", NAMES)
def test_tiny_scale_resolves(name: str) -> None:
    study = read_study(Path(name), scale="tiny")
    assert study.name.endswith("-tiny")
    trials = make_trials(study, Path("f"))
    assert all(trial.total_steps <= 2_000 for trial in trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["", "small"])
def test_other_scales_resolve(name: str, scale: str) -> None:
    total = sum(trial.total_steps for trial in make_trials(read_study(Path(name), scale=scale), Path("f")))
    assert total <= 3_000_000 if scale else total > 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_variant_is_trained_evaluated_and_drawn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", name, "--scale", "tiny", "--jobs", "2"]) == 0, capsys.readouterr().err
    study = read_study(Path(name), scale="tiny")
    folder = Path("runs") / study.name
    trials = make_trials(study, folder)
    assert all(trial.state().kind == "done" for trial in trials)
    assert all(trial.records(plan) for trial in trials for plan in trial.evaluations)
    page = (folder / "index.html").read_text()
    for analysis in study.analyses:
        assert analysis.name in page
    assert "not made yet" not in page
    assert page.count("<img") + page.count("<video") >= 1 + len(study.analyses)
