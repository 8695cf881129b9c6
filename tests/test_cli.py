"""The command line, as a user types it: every command, and every mistake we could think of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bestiary.cli import run_command
from bestiary.runs.folder import Run, open_run


def command(*words: str) -> int:
    return run_command(list(words))


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("trian toy/chain", ("unknown command trian", "did you mean train?")),
    ("train", ("which environment?",)),
    ("train Pong", ("did you mean atari/Pong?",)),
    ("train CartPole-v1", ("did you mean gymnasium/CartPole-v1?",)),
    ("train atari/Pnog", ("did you mean Pong",)),
    ("train attari/Pong", ("did you mean atari?",)),
    ("train gymnasium/CartPole-v9", ("gymnasium/CartPole-v9",)),
    ("train gymnasium/Pendulum-v1", ("Pendulum-v1: actions of Box", "not supported")),
    ("train toy/catsh", ("did you mean catch?",)),
    ("train toy/chain toy/catch", ("toy/chain and toy/catch cannot be played by one agent",)),
    ("train toy/chain --steps 0", ("--steps 0: must be at least 1",)),
    ("train toy/chain --steps many", ("--steps many: expected a number",)),
    ("train toy/chain --steps 1.5", ("--steps 1.5: expected a whole number",)),
    ("train toy/chain --steps", ("--steps needs a value",)),
    ("train toy/chain -s 3", ("unknown option -s",)),
    ("train toy/chain --out some/where", ("unknown option --out",)),
    ("train toy/chain --name ../evil", ("--name ../evil: a name of one folder",)),
    ("train --config number.toml", ("env = 3: expected the name of an environment",)),
    ("train --config named.toml", ("unknown option --name (in config named.toml): where a run goes is said on the",)),
    ("movie {run} --fps fast", ("--fps fast: expected a number",)),
    ("compare {run} --out no/such/curves.png", ("there is no folder no/such",)),
    ("train toy/chain --seed -1", ("--seed -1: must be at least 0",)),
    ("train toy/chain --memory lstn", ("--memory lstn: there is none, lstm, gru, delta,", "did you mean lstm")),
    ("train toy/chain --memori lstm", ("unknown option --memori; did you mean --memory",)),
    ("train toy/chain --memory.hidden 3", ("unknown option --memory.hidden: it is an option of memory lstm and gru",)),
    ("train toy/chain --memory srwm --memory.features elu", ("--memory.features: it is an option of memory delta",)),
    ("train toy/chain --memory fake-sr --memory.kernel numba", ("unknown option --memory.kernel: it is an option of",)),
    ("train toy/chain --memory srwm --memory.heads 7", ("--memory.heads 7 x head size 18 is not --memory.hidden 128",)),
    (
        "train toy/chain --memory delta --memory.head-size 8",
        ("--memory.heads 8 x head size 8 is not --memory.hidden 128; try --memory.hidden 64",),
    ),
    ("train toy/chain --memory delta --memory.truncate 3", ("--memory.truncate 3: expected one of none, step",)),
    (
        "train toy/chain --memory srwm --memory.kernel triton --device cpu",
        ("--memory.kernel triton: triton needs a GPU, and this is for cpu: choose numba or reference",),
    ),
    ("eval {run} --carry some", ("--carry some: expected a number",)),
    ("train toy/chain --torso.depht 3", ("unknown option --torso.depht; did you mean --torso.depth",)),
    ("train toy/chain --torso shallow", ("needs an image",)),
    ("train toy/catch --torso shallow", ("at least 36x36",)),
    ("train toy/chain --batch-size 24", ("--batch-size 24 and 16 environments a pool", "try --batch-size")),
    ("train toy/chain --device cuda:7", ("--device cuda:7: this machine has",)),
    ("train toy/chain --device gpu", ("--device gpu: expected auto, cpu, cuda",)),
    ("train toy/chain --num-envs 9", ("--num-envs 9 does not divide into --pools 2",)),
    ("train toy/chain --device meta", ("--device meta: expected auto, cpu, cuda",)),
    ("train toy/chain --device cpu:3", ("--device cpu:3: expected auto, cpu, cuda",)),
    ("train toy/chain --lag 1 --runtime serial", ("--lag 1: is for --runtime local",)),
    ("train toy/chain --popart --critic shared", ("--popart on and --critic shared contradict each other",)),
    ("train procgen/starpilot:esay", ("starpilot has the modes easy, hard, extreme; did you mean easy?",)),
    ("train procgen/maze:easy --levels 200:0", ("upside down; did you mean 0:200?",)),
    ("train procgen/maze:", ("maze has the modes easy, hard, memory, exploration",)),
    ("train procgen/maze:easy --valid-levels 9:3 --dry-run", ("--valid-levels 9:3: upside down",)),
    ("train toy/chain --init-from {run} --torso.width 7 --dry-run", ("its agent is another one than this",)),
    ("train toy/chain --init-from nowhere", ("nowhere: there is no such run",)),
    ("eval {run} --levels 0:200", ("toy/catch has no levels",)),
    ("eval {run} --checkpoint best", ("has none: it was not validated",)),
    ("compare {run} --zoom 4M", ("--zoom 4M: expected a part of the x axis",)),
    ("train warehouse --agent iam --agent.heads 4", ("--agent.heads is for --agent.dset attention; here it is items",)),
    ("bench --config pogn", ("invalid choice: 'pogn'",)),
    ("bench --config toy --json no/such/file.json", ("--json no/such/file.json: not a file that can be written",)),
    ("train toy/chain --if-exists maybe", ("expected one of error, resume, new",)),
    ("train toy/chain --preset helo", ("--preset helo", "did you mean hello?")),
    ("train --config missing.toml", ("missing.toml: there is no such file",)),
    ("train --config bad.toml", ("bad.toml: not readable as TOML",)),
    ("train --config unknown.toml", ("unknown option --frobnicate (in config unknown.toml)",)),
    ("train atari/Pong --sticky 2", ("--sticky 2: must be at most 1",)),
    ("train atari/Pong --frame-size 84", ("--frame-size 84: expected 2 values, such as 84x84",)),
    ("train missing.py:Maze", ("there is no file missing.py",)),
    ("train syntax.py:Maze", ("syntax.py, line 2: does not import: SyntaxError",)),
    ("train fails.py:Maze", ("fails.py: does not import: ZeroDivisionError",)),
    ("train parts.py:Mase", ("parts.py has no Mase; did you mean Maze?",)),
    ("train parts.py:Maze", ("parts.py:Maze", "lacks reset")),
    ("train toy/chain --torso parts.py:Torso", ("not a usable torso", "output_size")),
    ("train toy/chain --torso parts.py:Wrong", ("parts.py:Wrong: fails on a batch",)),
    ("train toy/chain --memory parts.py:Torso", ("not a usable memory: Torso lacks initial_state",)),
    ("train toy/chain --run-dir taken", ("taken exists and is not a run folder",)),
    ("train toy/chain --run-dir /proc/no/run", ("cannot be made",)),
    ("resume nothing", ("nothing: there is no such run",)),
    ("resume taken", ("taken is not a run folder",)),
    ("resume", ("the following arguments are required: RUN",)),
    ("eval nothing", ("there is no such run",)),
    ("eval {run} --episodes 0", ("--episodes 0: must be at least 1",)),
    ("eval {run} --episods 3", ("unknown option --episods; did you mean --episodes",)),
    ("eval {run} --greedy --sample", ("not allowed with",)),
    ("movie {run} --out play.mov", ("movies are .gif or .mp4",)),
    ("compare {run} --out curves.txt", ("figures are",)),
    ("compare {run} --axis hours", ("invalid choice: 'hours'",)),
    ("look", ("look at what?",)),
    ("look salience {run}", ("look salience: there is saliency, attention, filters, actions; did you mean saliency?",)),
    ("look saliency nothing", ("nothing: there is no such run",)),
    ("look saliency scripted:nearest --env warehouse", ("a script has no inside",)),
    ("look saliency {run} --out a.avi", ("--out a.avi: can be .gif or .mp4 or .png",)),
    ("look saliency {run} --start 500 --out a.gif", ("--start 500: the game was over after 9 steps",)),
    ("look saliency {run} --density 0", ("--density 0: must be at least 1",)),
    ("look saliency {run} --radius none", ("--radius none: expected a number",)),
    ("look attention {run} --out a.gif", ("its agent has no attention to draw",)),
    ("look filters {run}", ("--between runs: needs two runs or more",)),
    ("look filters {run} {run} --out a.png", ("no convolutions to compare",)),
    ("look filters {run} {run} --frames 3", ("so few align with anything",)),
    ("look actions {run} --episodes 0", ("--episodes 0: must be at least 1",)),
    ("look actions {run} --out a.txt", ("figures are .png or .svg or .pdf",)),
    ("movie {run} {run} --out a.gif --attention", ("--attention: of one agent",)),
    ("movie {run} --same-actions", ("needs two runs or more",)),
    ("movie {run} {run}", ("--out: where to?",)),
    ("movie {run} --game 2", ("--game 2: is for --replay",)),
    ("movie {run} --replay missing.json", ("missing.json: No such file",)),
    (
        "movie {run} zoo/pong --same-actions --saliency --out a.gif",
        ("atari/Pong and toy/catch are not one game; --env names a task",),
    ),
    ("movie {run} {run} --same-actions --out a.gif", ("there is one game, whoever watches",)),
    ("train atari/Pong --agent aaa --torso resnet", ("unknown option --torso: agent aaa has no torso to choose",)),
    ("train atari/Pong --input rgb", ("--input rgb: there is gray-stack, rgb-stack, rgb-last",)),
    ("train toy/catch --agent aaa", ("agent aaa needs images of at least 16x16, not 10x5: try --agent basic",)),
    ("report nowhere", ("there is no run below nowhere",)),
    ("report {run} --out page.txt", ("a page is .html",)),
    ("runs nowhere", ("there is no run below nowhere",)),
    ("list torsoes", ("invalid choice",)),
]


@pytest.fixture
def material() -> None:
    """Files that the mistakes are about."""
    Path("bad.toml").write_text("steps = = 3")
    Path("number.toml").write_text("env = 3\n")
    Path("named.toml").write_text('name = "x"\n[env]\nname = ["toy/chain"]\n')
    Path("unknown.toml").write_text('frobnicate = 1\n[env]\nname = ["toy/chain"]\n')
    Path("syntax.py").write_text("class Maze:\n    def reset(self:\n")
    Path("fails.py").write_text("1 / 0\n")
    Path("parts.py").write_text(
        "import torch.nn as nn\n"
        "class Maze:\n    pass\n"
        "class Torso(nn.Module):\n    def __init__(self, spec):\n        super().__init__()\n"
        "    def forward(self, observation):\n        return observation['vector']\n"
        "class Wrong(Torso):\n    output_size = 3\n"
    )
    Path("taken").mkdir()
    Path("taken/thesis.tex").write_text("years of work")


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
@pytest.mark.usefixtures("material")
def test_a_mistake_gets_clear_lines_and_status_2_before_any_work(
    words: str, expected: tuple[str, ...], catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in Path().rglob("*") if "__pycache__" not in str(path))
    assert command(*words.format(run=catch_runs[0].path).split()) == 2
    errors = capsys.readouterr().err
    for phrase in expected:
        assert phrase in errors
    assert all(line.startswith("bestiary: ") for line in errors.strip().splitlines()), errors
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in str(path)) == before


def test_all_problems_are_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "toy/chain", "--steps", "0", "--lr", "x", "--memory", "lstn", "--tims", "3") == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_hello_trains_evaluates_and_films(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--preset", "hello") == 0
    run = open_run("runs/latest")
    (evaluation,) = (run.path / "evaluations").glob("*.json")
    assert json.loads(evaluation.read_text())["statistics"]["game"]["mean"] > 0.8
    assert list((run.path / "movies").glob("*.gif"))
    output = capsys.readouterr()
    assert "return of a game" in output.out
    assert "steps/s" in output.err


def test_a_users_own_parts_from_their_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parent.parent / "examples"
    for file in examples.glob("*.py"):
        Path(file.name).write_text(file.read_text())
    parts = ["maze_env.py:Maze", "--torso", "tiny_torso.py:Tiny", "--memory", "ema_memory.py:Ema"]
    assert command("train", *parts, "--torso.width", "24", "--steps", "2k", "--name", "mine") == 0
    run = open_run("runs/mine")
    assert run.config.parts["torso"].options.width == 24
    assert command("eval", "runs/mine", "--episodes", "2") == 0
    assert command("movie", "runs/mine", "--length", "5", "--out", "maze.gif") == 0
    Path("tiny_torso.py").write_text(Path("tiny_torso.py").read_text() + "\n# changed\n")
    capsys.readouterr()
    assert command("eval", "runs/mine", "--episodes", "2") == 2
    assert "has changed since the run was made" in capsys.readouterr().err
    assert command("eval", "runs/mine", "--episodes", "2", "--trust-code") == 0
    Path("tiny_torso.py").unlink()
    assert command("resume", "runs/mine", "--steps", "3k") == 2
    assert "is no longer there" in capsys.readouterr().err
    assert command("resume", "runs/mine", "--steps", "3k", "--trust-code") == 0


def test_dry_run_prints_everything_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "atari/Pong", "--torso", "resnet", "--dry_run", "--lr=1e-3") == 0
    output = capsys.readouterr().out
    assert "1,091,038 parameters" in output
    assert "lr = 0.001" in output
    assert not Path("runs").exists()
    toml = output.split("\nenvironment")[0]
    Path("again.toml").write_text(toml)
    assert command("train", "--config", "again.toml", "--dry-run") == 0
    assert capsys.readouterr().out == output


def test_resume_eval_movie_compare_runs(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    one = str(catch_runs[0].path)
    assert command("eval", one, "--episodes", "5", "--checkpoint", "2k", "--greedy") == 0
    assert command("movie", one, "--out", "play.gif", "--length", "20") == 0
    assert Path("play.gif").stat().st_size > 500
    assert command("compare", *(str(run.path) for run in catch_runs), "--out", "c.png") == 0
    assert command("runs", str(catch_runs[0].path.parent)) == 0
    assert "finished" in capsys.readouterr().out
    assert command("resume", one) == 0  # finished: says so
    assert "is finished" in capsys.readouterr().err


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for what, expected in (("envs", "atari/Pong"), ("torsos", "resnet"), ("memories", "lstm"), ("presets", "hello")):
        assert command("list", what) == 0
        assert expected in capsys.readouterr().out
    assert command("list", "envs", "atari/breakout") == 0
    assert capsys.readouterr().out.split() == ["atari/Breakout"]


def test_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor") == 0
    assert "FAILED" not in capsys.readouterr().out


def test_help_is_grouped_and_says_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command("train", "atari/Pong", "--memory", "lstm", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for group in ("training:", "algo impala:", "memory lstm:", "torso shallow:", "environment atari/Pong:"):
        assert group in text
    assert "--lr FLOAT" in text
    assert "(default 0.0005)" in text
    assert command("--help") == 0
    assert command() == 2


def test_piped_output_is_plain_lines() -> None:
    words = [sys.executable, "-m", "bestiary", "train", "toy/chain", "--steps", "2k"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "\x1b" not in result.stderr + result.stdout
    assert "steps/s" in result.stderr
    assert result.stdout.startswith("run: runs/chain-mlp-")


@pytest.mark.parametrize("words", [[], ["list", "envs"]])
def test_a_reader_who_has_seen_enough_gets_no_traceback(words: list[str]) -> None:
    """`bestiary | head -1`: the pipe is closed before all is printed."""
    script = "import sys; from bestiary.cli import main; sys.stdin.read(); main(sys.argv[1:])"
    command = [sys.executable, "-c", script, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.close()  # only now it begins to print
        said = process.stderr.read()
        process.wait(60)
    assert b"Traceback" not in said
    assert process.returncode == 141
