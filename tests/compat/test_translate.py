"""Translation of single flags, modes and forks, and refusals."""

import shlex

import pytest

from bestiary.compat.flag_types import format_value
from bestiary.compat.programs import PROGRAMS
from bestiary.compat.translate import Translation, format_command, translate
from bestiary.utils.errors import UserError
from tests.compat.test_documents import resolve_words

RIVER_RAID = "--env RiverraidNoFrameskip-v4 --xpid a --savedir runs"
PROCGEN = "--env procgen:procgen-maze-v0 --xpid a --savedir runs"


def translated(program: str, arguments: str, cluster: str | None = None) -> Translation:
    return translate(program, shlex.split(arguments), cluster)


def command_of(program: str, arguments: str, cluster: str | None = None) -> str:
    (words,) = translated(program, arguments, cluster).commands
    return " ".join(words)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        # proxies of the reward-misspecification fork
        ("torchbeast.monobeast", f"{RIVER_RAID} --fuel_multiplier 10", "--reward fuel:10 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --fuel_multiplier 0", "--reward fuel:0 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --fuel_multiplier -20", "--reward pacifist:20 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --move_penalty 12.5", "--reward smooth:12.5 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --move_penalty -3", "--reward center:3 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --hidden_size 256", "--reward smooth:0 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --true_move_penalty -2", "--true-reward score=1; center:2 "),
        ("torchbeast.monobeast", f"{RIVER_RAID} --num_layers 3", "--algo.eps 0.0001 "),
        # networks
        ("torchbeast.monobeast", "--use_lstm", "--torso shallow --torso.subtract-mean off --agent.init torch"),
        ("torchbeast.monobeast", "--use_lstm", "--memory lstm --memory.layers 2 --memory.hidden 519"),
        ("torchbeast.polybeast", "--use_lstm", "--memory lstm --memory.layers 1 --memory.hidden 256"),
        ("torchbeast.monobeast", "--agent_type aaa", "--agent aaa --agent.subtract-mean off --algo.lr-schedule linear"),
        ("torchbeast.monobeast", "--frame_height 96", "--torso resnet"),
        ("torchbeast.monobeast", "--frame_height 96", "--frame-size 96x84"),
        ("torchbeast.monobeast", "--aaa_input_format rgb_last", "--gray off --frame-stack 1"),
        ("torchbeast.polybeast", "--env three --num_actors 3", "train atari/AirRaid atari/Carnival atari/DemonAttack"),
        ("torchbeast.polybeast", "--env SpaceInvadersNoFrameskip-v4", "--time-limit 75k"),
        ("torchbeast.polybeast", "--env six", "--time-limit 100k"),
        ("torchbeast.polybeast", "--save_model_every_nsteps 1000000", "--save-every 1M --keep-at 0"),
        ("torchbeast.polybeast", "--disable_cuda --disable_checkpoint", "--save-minutes 1000000000"),
        # memories on ProcGen
        ("torchbeast_procgen.polybeast", PROCGEN, "train procgen/maze:hard "),
        ("torchbeast_procgen.polybeast", PROCGEN, "--levels all --memory none"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_lstm", "--memory lstm --memory.hidden 256"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_delta", "--memory delta --memory.hidden 128"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_psr", "--memory fake-sr --memory.hidden 128"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_smfwp", "--memory sr-delta"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_no_carry_sr", "--memory srwm-no-carry"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --conv_scale 2", "--torso.channels 32,64,64"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_deep_ff --num_layers 3", "--memory deep-ff"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_deep_ff --num_layers 3", "--memory.layers 3"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_lt --use_sr", "--memory linear-transformer"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_delta_rnn", "--memory delta-rnn"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_rec_delta", "--memory recurrent-delta"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_rec_delta", "--memory.truncate step"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --use_dd", "--memory delta-delta"),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --num_levels 500 --start_level 10", "--levels 10:510"),
        (
            "torchbeast_procgen.polybeast",
            f"{PROCGEN} --validate_step_every 5000 --valid_num_runs 2",
            "--valid-every 5k",
        ),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --valid_num_runs 2", "--valid-episodes 10 --valid-levels all"),
        (
            "torchbeast_procgen.polybeast",
            "--multi_env 4 --distribution_mode memory --num_levels 500 --disable_validation --num_actors 48 "
            "--batch_size 32",
            "train procgen/dodgeball:memory procgen/heist:memory procgen/maze:memory procgen/miner:memory ",
        ),
        # influence-aware memory
        ("iam.main", "--env-name BreakoutNoFrameskip-v4 --IAM", "train atari/Breakout --time-limit 100k"),
        ("iam.main", "--env-name warehouse --use-gae --gae-lambda 0.9", "--algo.lam 0.9 "),
        ("iam.main", "--env-name warehouse --use-linear-lr-decay", "--algo.lr-schedule linear"),
        ("iam.main", "--env-name warehouse --num-mini-batch 32", "--algo.minibatches 16"),
        ("iam.main", "--env-name warehouse --log-interval 2 --num-processes 4", "--log-every 64"),
        ("iam.main", "--env-name warehouse --algo a2c", "--algo.epochs 1"),
    ],
)
def test_flags_are_translated(program: str, arguments: str, expected: str) -> None:
    translation = translated(program, arguments)
    (words,) = translation.commands
    assert expected in " ".join(words)
    resolve_words(words)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        (
            "torchbeast.polybeast",
            "--mode test --xpid a --env PongNoFrameskip-v4 --intermediate_model_id 050009600 --num_episodes 3",
            "eval ./logs/torchbeast-local/a --env atari/Pong --episodes 3 --greedy --checkpoint 50009600",
        ),
        (
            "torchbeast_procgen.polybeast_learner",
            f"--mode test {PROCGEN} --test_distribution_mode memory --test_model_name model_best_val.tar",
            "eval runs/a --env procgen/maze:memory --levels all --episodes 200 --checkpoint best --greedy",
        ),
        (
            "torchbeast_procgen.polybeast_learner",
            f"--mode test {PROCGEN} --eval_extra --test_no_carry_sr --test_num_levels 200",
            "eval runs/a --env procgen/maze:hard --levels 0:200 --checkpoint 50M --reset-state-every 80 --greedy",
        ),
        (
            "torchbeast.analysis.analyze_resnet",
            "--mode filter_vis --load_path models/Pong --layer_index 14",
            "look filters models/Pong --draw 11.second",
        ),
        (
            "torchbeast.analysis.analyze_resnet",
            "--mode filter_comp --load_path m --comp_no_optimal --comp_between single_single --save_dir out",
            "look filters m/Carnival m/AirRaid m/DemonAttack m/NameThisGame m/Pong m/SpaceInvaders --match index "
            "--points 10 --out out/single_single-index.png",
        ),
    ],
)
def test_modes_are_translated(program: str, arguments: str, expected: str) -> None:
    assert command_of(program, arguments) == expected


def test_several_comparisons_are_several_commands() -> None:
    translation = translated(
        "torchbeast.analysis.analyze_resnet", "--mode filter_comp --comp_between time_steps single_multi --load_path m"
    )
    assert [words[-1] if "--between" in words else words[2] for words in translation.commands] == [
        "time",
        "time",
        "m/MultiTask",
        "m/MultiTask",
    ]


def test_differences_name_explained_flags_once() -> None:
    translation = translated(
        "torchbeast.monobeast", "--num_actors 45 --batch_size 4 --num_buffers 60 --pipes_basename unix:/tmp/a"
    )
    lines = translation.differences
    assert not any("num_actors" in line for line in lines)
    assert "--num-envs 45" in " ".join(translation.commands[0])
    assert len([line for line in lines if "--num_buffers 60" in line]) == 1
    assert len([line for line in lines if "--pipes_basename unix:/tmp/a" in line]) == 1


def test_the_seed_follows_from_the_name_of_the_run() -> None:
    first, again, other = (
        resolve_words(translated("torchbeast.polybeast", f"--xpid {name}").commands[0]) for name in "aab"
    )
    assert first.training.seed == again.training.seed != other.training.seed


def test_environment_servers_are_explained_and_started_only_with_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESTIARY_CORES", "4")
    printed = translated("torchbeast.polybeast_env", "--num_servers 10")
    assert not printed.starts
    assert any("--cluster local" in line for line in printed.differences)
    started = translated("torchbeast.polybeast_env", "--num_servers 10", "local")
    assert started.starts
    config = resolve_words(started.commands[0])
    assert (config.training.actors, config.training.num_envs) == (4, 3)  # as many actors as cores
    assert any("4 actor processes" in line for line in started.differences)
    remote = resolve_words(translated("torchbeast.polybeast_learner", "--num_actors 10", "10.0.0.5:6379").commands[0])
    assert (remote.training.cluster, remote.training.actors, remote.training.num_envs) == ("10.0.0.5:6379", 10, 1)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("torchbeast.monobeats", "", ("unknown program", "did you mean torchbeast.monobeast")),
        ("python", "-m torchbeast.monobeast", ("unknown program", "leave out")),
        (
            "torchbeast.monobeast",
            "--num_actorz 3 --lr 1",
            ("--num_actorz", "--num_actors", "did you mean --learning_rate"),
        ),
        ("torchbeast.monobeast", "--num_actors many", ("--num_actors many: expected a number",)),
        ("torchbeast.monobeast", "--num_actors", ("--num_actors needs a value",)),
        ("torchbeast.monobeast", "--use_lstm=1", ("--use_lstm is a switch",)),
        ("torchbeast.monobeast", "3", ("unexpected argument 3",)),
        ("torchbeast.monobeast", "--mode tset", ("--mode tset", "did you mean test")),
        ("torchbeast.monobeast", "--mode test", ("--xpid: required",)),
        (
            "torchbeast.monobeast",
            "--use_popart --fuel_multiplier 3",
            ("--use_popart (fork popart)", "--fuel_multiplier"),
        ),
        ("torchbeast.monobeast", "--env Mock", ("--env Mock", "toy/catch")),
        ("torchbeast.monobeast", "--env PogNoFrameskip-v4", ("--env PogNoFrameskip-v4: not a known game",)),
        ("torchbeast.polybeast", "--actions a.txt --xpid a", ("--actions a.txt", "--replay")),
        ("torchbeast_procgen.polybeast", f"{PROCGEN} --dropout 0.1", ("--dropout 0.1: the memories have no dropout",)),
        ("torchbeast_procgen.polybeast", "", ("--env PongNoFrameskip-v4: expected a ProcGen game",)),
        ("torchbeast_procgen.polybeast", "--multi_env 40", ("--multi_env 40", "only 16 games")),
        ("torchbeast.analysis.analyze_resnet", "--mode filter_comp --comp_between all", ("--comp_between all",)),
        ("iam.main", "--env-name traffic", ("--env-name traffic", "not available")),
        ("iam.main", "--env-name warehouse --algo acktr", ("--algo acktr", "use ppo or a2c")),
        ("iam.main", "--env-name warehouse --gail", ("--gail", "not available")),
        ("iam.main", "--env-name warehouse --IAM --recurrent-policy", ("--recurrent-policy", "remove it")),
        ("iam.main", "--env-name warehouse --flicker", ("--flicker: only for Atari games",)),
        ("iam.main", "--env-name BreakoutNoFrameskip-v4", ("add --IAM",)),
    ],
)
def test_refusals(program: str, arguments: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        translated(program, arguments)
    for phrase in expected:
        assert phrase in str(error.value)


def test_a_cluster_is_refused_for_programs_without_actors() -> None:
    with pytest.raises(UserError, match="remove --cluster"):
        translated("torchbeast.saliency", "--xpid a", "local")


def test_each_program_accepts_its_own_defaults_as_flags() -> None:
    required = {"torchbeast.saliency": "--xpid a", "torchbeast.analysis.visualize_aaa": "--xpid a"}
    required |= dict.fromkeys(("torchbeast_procgen.polybeast", "torchbeast_procgen.polybeast_learner"), PROCGEN)
    required["iam.main"] = "--IAM"
    for name, program in PROGRAMS.items():
        for flag in program.flags:
            if flag.kind is not bool and flag.default is not None and f"--{flag.name} " not in required.get(name, ""):
                if name.startswith("torchbeast_procgen") and flag.name == "env":
                    continue  # the default of the original is no ProcGen game
                translated(name, f"{required.get(name, '')} --{flag.name} {shlex.quote(str(flag.default))}")


@pytest.mark.parametrize(
    ("value", "text"),
    [(300_000_000, "300M"), (1500, "1500"), (2000, "2k"), (0, "0"), (0.00048, "0.00048"), (40.0, "40")],
)
def test_values_are_formatted_for_options(value: float, text: str) -> None:
    assert format_value(value) == text


def test_a_printed_command_can_be_copied() -> None:
    words = ("train", "atari/Pong", "--true-reward", "score=1; smooth:5", *("--lr", "0.1") * 20)
    printed = format_command(words)
    assert tuple(shlex.split(printed.replace("\\\n", " "))) == ("bestiary", *words)
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "clamps"),
    [
        ("--use_popart --reward_clipping none", False),
        ("--use_popart", True),
        ("--reward_clipping none", True),
    ],
)
def test_only_the_resnet_of_the_popart_fork_sees_rewards_that_are_not_clamped(arguments: str, clamps: bool) -> None:
    config = resolve_words(translated("torchbeast.polybeast", f"--xpid a {arguments}").commands[0])
    options = config.components["agent"].options
    assert options.clamp_reward is clamps
    assert options.reset_inputs is False
