"""Error messages of the command line: invalid input gives one line per problem, status 2, and no files."""

from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.runs.run import Run


def command(*words: str) -> int:
    return run_command(list(words))


INVALID_COMMANDS: list[tuple[str, tuple[str, ...]]] = [
    ("trian toy/chain", ("unknown command trian", "did you mean train?")),
    ("train", ("no environment given",)),
    ("train Pong", ("did you mean atari/Pong?",)),
    ("train CartPole-v1", ("did you mean gymnasium/CartPole-v1?",)),
    ("train atari/Pnog", ("did you mean Pong",)),
    ("train attari/Pong", ("did you mean atari?",)),
    ("train gymnasium/CartPole-v9", ("gymnasium/CartPole-v9",)),
    ("train gymnasium/Pendulum-v1", ("Pendulum-v1", "Box", "not supported")),
    ("train toy/catsh", ("did you mean catch?",)),
    ("train toy/chain toy/catch", ("one agent cannot play both toy/chain and toy/catch",)),
    ("train PongNoFrameskip-v4", ("PongNoFrameskip-v4", "in Bestiary, write atari/Pong")),
    ("eval {run} --env procgen:procgen-maze-v0", ("in Bestiary, write procgen/maze",)),
    ("train toy/chain --learning_rate 1e-3", ("unknown option --learning-rate; did you mean --lr?",)),
    ("train toy/chain --use_lstm", ("did you mean --memory lstm?",)),
    ("train toy/chain --IAM", ("did you mean --agent iam?",)),
    ("train toy/chain --hidden_size 64", ("did you mean --torso.width?",)),
    ("train toy/chain --total-timesteps 1000", ("did you mean --steps?",)),
    ("train toy/chain --clip_range 0.2", ("it corresponds to --algo.clip, which does not exist with this command",)),
    ("eval {run} --num_episodes 4", ("unknown option --num-episodes; did you mean --episodes?",)),
    ("test {run}", ("unknown command test; did you mean eval?",)),
    ("compat", ("PROGRAM",)),
    ("compat torchbeast.monobeat", ("unknown program", "did you mean torchbeast.monobeast")),
    ("compat torchbeast.monobeast --num_actorz 4", ("--num_actorz: unknown flag", "did you mean --num_actors")),
    ("train toy/chain --steps 0", ("--steps 0: must be at least 1",)),
    ("train toy/chain --steps many", ("--steps many: expected a number",)),
    ("train toy/chain --steps 1.5", ("--steps 1.5: expected an integer",)),
    ("train toy/chain --steps", ("--steps needs a value",)),
    ("train toy/chain -s 3", ("unknown option -s",)),
    ("train toy/chain --out some/where", ("unknown option --out",)),
    ("train toy/chain --name ../evil", ("--name ../evil", "name of a folder")),
    ("train --config number.toml", ("env = 3: expected the name of an environment",)),
    ("train --config named.toml", ("unknown option --name (in config named.toml): the location of a run",)),
    ("video {run} --fps fast", ("--fps fast: expected a number",)),
    ("compare {run} --out no/such/curves.png", ("there is no folder no/such",)),
    ("train toy/chain --seed -1", ("--seed -1: must be at least 0",)),
    ("train toy/chain --memory lstn", ("--memory lstn", "none, lstm, gru, delta,", "did you mean lstm")),
    ("train toy/chain --memori lstm", ("unknown option --memori; did you mean --memory",)),
    ("train toy/chain --memory.hidden 3", ("unknown option --memory.hidden: it is an option of memory lstm and gru",)),
    (
        "train toy/chain --memory srwm --memory.feature-map elu",
        ("--memory.feature-map: it is an option of memory delta",),
    ),
    ("train toy/chain --memory fake-sr --memory.kernel numba", ("unknown option --memory.kernel: it is an option of",)),
    (
        "train toy/chain --memory srwm --memory.heads 7",
        ("--memory.heads 7 x head size 18 must equal --memory.hidden 128",),
    ),
    (
        "train toy/chain --memory delta --memory.head-size 8",
        ("--memory.heads 8 x head size 8 must equal --memory.hidden 128; try --memory.hidden 64",),
    ),
    ("train toy/chain --memory delta --memory.truncate 3", ("--memory.truncate 3: expected one of none, step",)),
    (
        "train toy/chain --memory srwm --memory.kernel triton --device cpu",
        ("--memory.kernel triton", "only GPUs", "choose --memory.kernel numba or reference"),
    ),
    ("eval {run} --reset-state-every some", ("--reset-state-every some: expected a number",)),
    ("train toy/chain --torso.depht 3", ("unknown option --torso.depht; did you mean --torso.depth",)),
    ("train toy/chain --torso shallow", ("needs an image",)),
    ("train toy/catch --torso shallow", ("at least 36x36",)),
    ("train toy/chain --device cuda:7", ("--device cuda:7: this machine has",)),
    ("train toy/chain --device gpu", ("--device gpu: expected auto, cpu, cuda",)),
    ("train toy/chain --num-envs 3 --pools 4", ("--num-envs 3: each of the 4 pools needs", "--num-envs 4")),
    ("train toy/chain --device meta", ("--device meta: expected auto, cpu, cuda",)),
    ("train toy/chain --device cpu:3", ("--device cpu:3: expected auto, cpu, cuda",)),
    ("train toy/chain --lag 1 --runtime serial", ("--lag 1: has no effect with --runtime serial",)),
    ("train procgen/starpilot:esay", ("starpilot has the modes easy, hard, extreme; did you mean easy?",)),
    ("train procgen/maze:easy --levels 200:0", ("the start is above the end; did you mean 0:200?",)),
    ("train procgen/maze:", ("maze has the modes easy, hard, memory, exploration",)),
    ("train procgen/maze:easy --valid-levels 9:3 --dry-run", ("--valid-levels 9:3: the start is above the end",)),
    ("train toy/chain --init-from {run} --torso.width 7 --dry-run", ("its weights do not fit this agent",)),
    ("train toy/chain --init-from nowhere", ("nowhere: there is no such run",)),
    ("eval {run} --levels 0:200", ("toy/catch has no levels",)),
    ("eval {run} --checkpoint best", ("has no such checkpoint, because the run was not validated",)),
    ("compare {run} --zoom 4M", ("--zoom 4M: expected a range",)),
    ("train warehouse --agent iam --agent.heads 4", ("--agent.heads: only for --agent.dset attention, not items",)),
    ("bench --config pogn", ("invalid choice: 'pogn'",)),
    ("bench --config toy --json no/such/file.json", ("--json no/such/file.json: cannot be written",)),
    ("train toy/chain --if-exists maybe", ("expected one of error, resume, new",)),
    ("train toy/chain --preset helo", ("--preset helo", "did you mean hello?")),
    ("train --config missing.toml", ("missing.toml: no such file",)),
    ("train --config bad.toml", ("bad.toml: not a valid TOML file",)),
    ("train --config unknown.toml", ("unknown option --frobnicate (in config unknown.toml)",)),
    ("train atari/Pong --sticky 2", ("--sticky 2: must be at most 1",)),
    ("train atari/Pong --frame-size 84", ("--frame-size 84: expected 2 values, such as 84x84",)),
    ("train missing.py:Maze", ("file missing.py does not exist",)),
    ("train syntax.py:Maze", ("syntax.py, line 2: cannot be imported: SyntaxError",)),
    ("train fails.py:Maze", ("fails.py: cannot be imported: ZeroDivisionError",)),
    ("train parts.py:Mase", ("parts.py has no Mase; did you mean Maze?",)),
    ("train parts.py:Maze", ("parts.py:Maze", "lacks reset")),
    ("train toy/chain --torso parts.py:Torso", ("not a usable torso", "output_size")),
    ("train toy/chain --torso parts.py:Wrong", ("parts.py:Wrong: forward returned",)),
    ("train toy/chain --memory parts.py:Torso", ("not a usable memory: Torso lacks initial_state",)),
    ("train toy/chain --run-dir taken", ("taken exists and is not a run folder",)),
    ("train toy/chain --run-dir /proc/no/run", ("cannot be created",)),
    ("resume nothing", ("nothing: there is no such run",)),
    ("resume taken", ("taken is not a run folder",)),
    ("resume", ("the following arguments are required: RUN",)),
    ("eval nothing", ("there is no such run",)),
    ("eval {run} --episodes 0", ("--episodes 0: must be at least 1",)),
    ("eval {run} --episods 3", ("unknown option --episods; did you mean --episodes",)),
    ("eval {run} --greedy --sample", ("not allowed with",)),
    ("video {run} --out play.mov", ("videos are .gif or .mp4",)),
    ("compare {run} --out curves.txt", ("figures are",)),
    ("compare {run} --axis hours", ("invalid choice: 'hours'",)),
    ("look", ("no tool given", "saliency, attention, filters, actions")),
    ("look salience {run}", ("look salience: unknown tool", "interventions, probes; did you mean saliency?")),
    ("look saliency nothing", ("nothing: there is no such run",)),
    ("look saliency scripted:nearest --env warehouse", ("scripted:nearest: a scripted policy has no network",)),
    ("look saliency {run} --out a.avi", ("--out a.avi", ".gif or .mp4 or .png")),
    ("look saliency {run} --start 500 --out a.gif", ("--start 500", "after 9 steps")),
    ("look saliency {run} --density 0", ("--density 0: must be at least 1",)),
    ("look saliency {run} --radius none", ("--radius none: expected a number",)),
    ("look attention {run} --out a.gif", ("the agent has no attention",)),
    ("look filters {run}", ("--between runs: needs at least two runs",)),
    ("look filters {run} {run} --out a.png", ("the agent has no convolutions",)),
    ("look filters {run} {run} --frames 3", ("--frames 3: CKA needs at least 4 frames",)),
    ("look actions {run} --episodes 0", ("--episodes 0: must be at least 1",)),
    ("look actions {run} --out a.txt", ("figures are .png or .svg or .pdf",)),
    ("video {run} {run} --out a.gif --attention", ("--attention: only for one run",)),
    ("video {run} --same-actions", ("--same-actions: needs at least two runs",)),
    ("video {run} {run}", ("--out is required",)),
    ("video {run} --game 2", ("--game 2: has an effect only with --replay",)),
    ("video {run} --replay missing.json", ("missing.json: No such file",)),
    (
        "video {run} zoo/pong --same-actions --saliency --out a.gif",
        ("atari/Pong and toy/catch are different games",),
    ),
    ("video {run} {run} --same-actions --out a.gif", ("--same-actions", "--saliency")),
    ("train atari/Pong --agent aaa --torso resnet", ("unknown option --torso: agent aaa has no torso",)),
    ("train toy/catch --agent aaa", ("agent aaa needs images of at least 16x16, not 10x5; try --agent basic",)),
    ("report nowhere", ("there is no run below nowhere",)),
    ("report {run} --out page.txt", ("--out page.txt", ".html")),
    ("runs nowhere", ("there is no run below nowhere",)),
    ("list torsoes", ("invalid choice",)),
]


@pytest.fixture
def invalid_files() -> None:
    """Create the files that the commands refer to."""
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


@pytest.mark.parametrize(("words", "expected"), INVALID_COMMANDS, ids=[words for words, _ in INVALID_COMMANDS])
@pytest.mark.usefixtures("invalid_files")
def test_invalid_input_is_reported_with_status_2_and_writes_no_file(
    words: str, expected: tuple[str, ...], catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in Path().rglob("*") if "__pycache__" not in str(path))
    assert command(*words.format(run=catch_runs[0].path).split()) == 2
    errors = capsys.readouterr().err
    for phrase in expected:
        assert phrase in errors
    assert all(line.startswith("bestiary: ") for line in errors.strip().splitlines()), errors
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in str(path)) == before


def test_all_problems_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "toy/chain", "--steps", "0", "--lr", "x", "--memory", "lstn", "--tims", "3") == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_network_that_needs_too_much_memory_is_reported_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # A weight matrix of 1.6 PB is larger than the address space of a process.
    assert command("train", "toy/recall", "--memory", "lstm", "--memory.hidden", "10000000", "--run-dir", "r") == 1
    errors = capsys.readouterr().err
    assert "not enough memory" in errors
    assert "smaller network" in errors
