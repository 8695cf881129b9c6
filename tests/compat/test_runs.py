"""Command lines of the original programs, run with few steps: they train, test, draw and analyse."""

import shlex
from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.runs.run import open_run

SMALL = "--num_actors 4 --batch_size 4 --unroll_length 5 --total_steps 100 --savedir logs"


def compat(arguments: str) -> int:
    return run_command(["compat", *shlex.split(arguments)])


def test_dry_run_prints_only_the_command_and_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat(f"torchbeast.monobeast --env PongNoFrameskip-v4 --xpid a --num_buffers 60 {SMALL} --dry-run") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("bestiary train atari/Pong --run-dir logs/a ")
    assert "note: --num_buffers 60: not needed" in printed.err
    assert not Path("logs").exists()


def test_help_lists_the_flags_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat("torchbeast.saliency --help") == 0
    assert "--first_frame" in capsys.readouterr().out


def test_the_printed_command_creates_the_same_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat(f"torchbeast.monobeast --env PongNoFrameskip-v4 --xpid a {SMALL}") == 0
    printed = capsys.readouterr().out.partition("\nrun: ")[0]
    words = shlex.split(printed.replace("\\\n", " ").replace("logs/a", "logs/b"))
    assert run_command(words[1:]) == 0
    assert Path("logs/a/config.toml").read_bytes() == Path("logs/b/config.toml").read_bytes()


def test_the_warehouse_trains_with_notes_after_the_flags() -> None:
    small = "--num-processes 4 --num-env-steps 64 --log-dir log_w/FNN1-1"
    assert compat(f"iam.main --env-name warehouse --num-steps 1 --recurrent-policy {small} --seed 1 170fps") == 0
    assert open_run("log_w/FNN1-1").steps >= 64


def test_environment_servers_are_not_started_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat("torchbeast.polybeast_env --num_servers 10 --xpid a --savedir logs") == 0
    assert "--cluster local" in capsys.readouterr().out
    assert not Path("logs").exists()


@pytest.mark.slow
def test_popart_fork_trains_tests_draws_and_compares() -> None:
    for name, flags in (("MultiTask", ""), ("MultiTaskPopArt", "--use_popart")):
        games = "--env AirRaidNoFrameskip-v4,CarnivalNoFrameskip-v4"
        assert compat(f"torchbeast.polybeast --xpid {name} {games} {SMALL} --save_model_every_nsteps 50 {flags}") == 0
    run = "--xpid MultiTaskPopArt --env CarnivalNoFrameskip-v4 --savedir=./logs"
    assert compat(f"torchbeast.polybeast --mode test {run} --num_episodes 1") == 0
    assert compat(f"torchbeast.polybeast --mode test_render {run}") == 0
    assert compat(f"torchbeast.polybeast --mode record {run}") == 0
    assert compat(f"torchbeast.saliency {run} --resolution=75 --num_frames 1 --density 20") == 0
    kinds = "--comp_num_models 2 --comp_between multi_multipop"
    assert compat(f"torchbeast.analysis.analyze_resnet --model_load_path logs --mode filter_comp {kinds}") == 0
    plot = "--mode filter_comp_plot --save_figures --comp_between multi_multipop"
    assert compat(f"torchbeast.analysis.analyze_resnet --load_path logs {plot}") == 0
    assert compat("torchbeast.analysis.analyze_resnet --load_path logs/MultiTask --layer_index 1") == 0
    folder = Path("logs/MultiTaskPopArt")
    assert list(folder.glob("evaluations/*.json"))
    assert list(folder.glob("videos/*.gif"))
    assert list(folder.glob("recordings/*.json"))
    assert list(folder.glob("interpretability/saliency-*.gif"))
    assert Path("logs/multi_multipop-index.png").is_file()
    assert Path("logs/multi_multipop-optimal.png").is_file()
    # The weights before training, and the first checkpoint at or after each multiple of 50 steps.
    assert [checkpoint.steps for checkpoint in open_run("logs/MultiTask").checkpoints] == [0, 60, 100]


@pytest.mark.slow
def test_attention_agent_trains_and_is_drawn() -> None:
    agent = "--agent_type aaa --aaa_input_format rgb_last --env PongNoFrameskip-v4"
    assert compat(f"torchbeast.monobeast --xpid aaa {agent} {SMALL}") == 0
    assert compat("torchbeast.analysis.visualize_aaa --xpid aaa --savedir logs --first_frame 0 --num_frames 2") == 0
    assert list(Path("logs/aaa/interpretability").glob("attention-*"))


@pytest.mark.slow
def test_reward_fork_trains_and_is_audited() -> None:
    run = "--env RiverraidNoFrameskip-v4 --xpid staggered_64_2 --fuel_multiplier -20 --true_move_penalty 3"
    assert compat(f"torchbeast.monobeast {run} --hidden_size 64 --num_layers 2 {SMALL}") == 0
    assert compat(f"torchbeast.monobeast {run} --savedir logs --mode eval --num_episodes 1") == 0
    assert Path("audit/audit.csv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", "--use_lstm", "--use_delta", "--use_sr", "--use_psr", "--use_smfwp"])
def test_srwm_fork_trains(flag: str) -> None:
    sizes = f"--num_head 2 --dim_head 8 --hidden_size 16 {flag}"
    levels = "--num_levels 200 --distribution_mode easy --valid_distribution_mode easy --valid_num_levels 4"
    validation = "--valid_start_level 500 --valid_num_episodes 1"
    assert compat(f"torchbeast_procgen.polybeast --multi_env 2 --xpid a {SMALL} {sizes} {levels} {validation}") == 0
    assert open_run("logs/a").steps >= 100


@pytest.mark.slow
def test_srwm_fork_tests() -> None:
    game = "--env procgen:procgen-fruitbot-v0 --xpid a"
    assert compat(f"torchbeast_procgen.polybeast {game} --distribution_mode easy --disable_validation {SMALL}") == 0
    test = f"{game} --savedir logs --mode test --test_distribution_mode easy --test_num_levels 200"
    assert compat(f"torchbeast_procgen.polybeast_learner {test}") == 0
    assert list(Path("logs/a/evaluations").glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--env-name warehouse --num-steps 8 --recurrent-policy",
        "--env-name warehouse --num-steps 8",
        "--env-name warehouse --num-steps 8 --IAM",
        "--env-name warehouse --num-steps 8 --IAM --algo a2c --use-gae",
        "--env-name BreakoutNoFrameskip-v4 --num-steps 8 --IAM --flicker",
    ],
)
def test_influence_aware_memory_trains(flags: str) -> None:
    assert compat(f"iam.main {flags} --num-processes 8 --num-env-steps 128 --log-dir log") == 0
    assert open_run("log").steps >= 128


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_environment_servers_become_actors_of_a_local_cluster() -> None:
    assert compat(f"--cluster local torchbeast.polybeast_env --num_servers 2 --xpid a {SMALL}") == 0
    assert open_run("logs/a").config.training.actors == 2
