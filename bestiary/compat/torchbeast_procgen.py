"""Translation of command lines of the ProcGen fork of TorchBeast.

The fork trains agents with self-referential weight matrices (SRWM) and other memories. Most functions with the argument
`values` are rules (`Mode.rules`). A rule gets the values of the original flags and returns words of the equivalent
Bestiary command.
"""

from dataclasses import replace

from bestiary.compat.flag_types import IGNORED, JOINT, REFUSED, Flag, Mode, Program, Values, Words, format_value
from bestiary.compat.torchbeast import actors, existing_run, new_run
from bestiary.compat.torchbeast_flags import LEARNER_FLAGS, PLAY
from bestiary.envs.original_names import bestiary_names
from bestiary.utils.errors import UserError

MODES = ("easy", "hard", "extreme", "memory", "exploration")
# --multi_env N: the tasks are the first N games of GAMES, or of MEMORY_GAMES in mode memory.
GAMES = (
    "bigfish fruitbot maze leaper plunder starpilot miner bossfight caveflyer chaser climber coinrun dodgeball heist "
    "jumper ninja"
).split()
MEMORY_GAMES = "dodgeball heist maze miner caveflyer jumper".split()

# Flag -> memory. If several of these flags are given, the first one in this order applies, as in the original.
MEMORIES = {
    "use_delta": "delta",
    "use_lt": "linear-transformer",
    "use_delta_rnn": "delta-rnn",
    "use_rec_delta": "recurrent-delta",
    "use_dd": "delta-delta",
    "use_sr": "srwm",
    "use_psr": "fake-sr",
    "use_smfwp": "sr-delta",
    "use_no_carry_sr": "srwm-no-carry",
    "use_deep_ff": "deep-ff",
}
WITHOUT_STATE = ("fake-sr", "deep-ff")  # memories without the option `truncate`


def games(values: Values) -> tuple[str, ...]:
    """Return the names of the tasks of a training."""
    mode = values["distribution_mode"]
    if values["multi_env"] > 1:
        known = MEMORY_GAMES if mode == "memory" else GAMES
        if values["multi_env"] > len(known):
            raise UserError(f"--multi_env {values['multi_env']}: the list of mode {mode} has only {len(known)} games")
        return tuple(f"procgen/{game}:{mode}" for game in known[: values["multi_env"]])
    return (f"{game_name(values['env'])}:{mode}",)


def game_name(text: str) -> str:
    """Return the Bestiary name of a ProcGen game, without its mode."""
    names = bestiary_names(text)
    if len(names) != 1 or not names[0].startswith("procgen/"):
        raise UserError(f"--env {text}: expected a ProcGen game, for example procgen:procgen-starpilot-v0")
    return names[0].partition(":")[0]


def environments(values: Values) -> Words:
    """Return the names of the environments of a training."""
    return Words(games(values))


def num_envs(values: Values) -> Words:
    """Return the options for the number of environments of a training."""
    return actors(games(values), values["num_actors"], "num_actors", values.cluster)


def level_range(start: int, count: int) -> str:
    """Return the value of --levels for `count` levels from level `start`. A count of 0 stands for all levels."""
    return f"{start}:{start + count}" if count else "all"


def levels(values: Values) -> Words:
    """Return the option for the training levels."""
    return Words(("--levels", level_range(values["start_level"], values["num_levels"])))


def memory(values: Values) -> Words:
    """Return the options of the memory: its kind and its sizes."""
    chosen = next((name for name in MEMORIES if values[name]), None)
    if chosen is None:
        return Words(("--memory", "lstm", "--memory.hidden", "256") if values["use_lstm"] else ("--memory", "none"))
    sizes = {"hidden": "hidden_size", "layers": "num_layers", "ff": "dim_ff"}
    if chosen != "use_deep_ff":
        sizes |= {"heads": "num_head", "head-size": "dim_head"}
    words = ["--memory", MEMORIES[chosen]]
    for option, flag in sizes.items():
        words += [f"--memory.{option}", str(values[flag])]
    differences: tuple[str, ...] = ()
    if MEMORIES[chosen] not in WITHOUT_STATE:
        words += ["--memory.truncate", "step"]
        differences = (
            f"--{chosen}: gradients do not pass from step to step, as in the published code; --memory.truncate none "
            "lets them pass through the rollout, as in the paper",
        )
    if chosen == "use_no_carry_sr":
        words += ["--memory.reset-interval", "1"]
        differences += (
            "--use_no_carry_sr: the state is reset in every step, as in the published code; in the paper, after each "
            "rollout",
        )
    return Words(tuple(words), differences)


def torso(values: Values) -> Words:
    """Return the option for the number of channels of the convolutions."""
    scale = values["conv_scale"]
    return Words(("--torso.channels", f"{16 * scale},{32 * scale},{32 * scale}") if scale != 1 else ())


def validation(values: Values) -> Words:
    """Return the options for the validation during training."""
    if values["disable_validation"]:
        return Words()
    every = values["validate_step_every"]
    differences: tuple[str, ...] = ()
    if every <= 0:
        every = 1_000_000
        differences = (f"validation every 1M steps; in the original, every {values['validate_every']} minutes",)
    episodes = values["valid_num_episodes"] * values["valid_num_runs"]
    words = ["--valid-every", format_value(every), "--valid-episodes", str(episodes)]
    words += ["--valid-levels", level_range(values["valid_start_level"], values["valid_num_levels"])]
    words += ["--valid-mode", values["valid_distribution_mode"]]
    return Words(tuple(words), differences)


def extra_checkpoint(values: Values) -> Words:
    """Return the option for the additional checkpoint, unless its step is after the end of the training."""
    steps = values["save_extra_checkpoint"]
    return Words(("--keep-at", format_value(steps)) if 0 < steps <= values["total_steps"] else ())


def rolling_checkpoints(values: Values) -> Words:
    """Return the option for the interval between rolling checkpoints."""
    return Words(() if values["disable_checkpoint"] else ("--save-minutes", "10"))


def wandb(values: Values) -> Words:
    """Return the option for the Weights & Biases project, if --use_wandb is given."""
    project = ("--logger.project", values["project_name"]) if values["project_name"] else ()
    return Words(("--logger", "wandb", *project) if values["use_wandb"] else ())


def test_levels(values: Values) -> Words:
    """Return the options for the test levels and the number of games."""
    count = values["test_num_levels"]
    words = ("--levels", level_range(values["test_start_level"], count))
    if count == TEST_GAMES:
        return Words(words, (f"each of the {count} levels is played once; in the original, {count} random ones",))
    return Words((*words, "--episodes", str(TEST_GAMES)))


def test_environment(values: Values) -> Words:
    """Return the option for the game and its mode in a test."""
    return Words(("--env", f"{game_name(values['env'])}:{values['test_distribution_mode']}"))


def test_checkpoint(values: Values) -> Words:
    """Return the option for the checkpoint of a test."""
    name = values["test_model_name"]
    if values["eval_extra"] or name == "model_extra.tar":
        return Words(("--checkpoint", format_value(values["save_extra_checkpoint"])))
    return Words(("--checkpoint", "best") if name == "model_best_val.tar" else ())


def test_memory(values: Values) -> Words:
    """Return the option for the interval at which the recurrent state is reset in a test."""
    return Words(("--reset-state-every", str(values["unroll_length"])) if values["test_no_carry_sr"] else ())


TEST_GAMES = 200
TRAIN_EVAL = ("train", *PLAY)
FLAGS = (
    Flag("mode", "train", "the commands `train`, `eval`, `video`", status=JOINT, commands=TRAIN_EVAL),
    Flag(
        "env",
        "PongNoFrameskip-v4",
        "ENV, for example `procgen/starpilot:easy`; for a test `--env ENV`",
        status=JOINT,
        commands=TRAIN_EVAL,
    ),
    Flag("multi_env", 1, "several ENV: the first N games of the fork's list", status=JOINT, kind=int),
    Flag("distribution_mode", "hard", "the mode in ENV, for example `:easy`", status=JOINT, choices=MODES),
    Flag("xpid", None, "last part of `--run-dir SAVEDIR/XPID`, or of RUN", status=JOINT, commands=TRAIN_EVAL),
    Flag(
        "savedir",
        "~/palaas/torchbeast",
        "first part of `--run-dir SAVEDIR/XPID`, or of RUN",
        status=JOINT,
        commands=TRAIN_EVAL,
    ),
    Flag("num_actors", 4, "`--num-envs`", status=JOINT, kind=int),
    Flag("num_servers", 4, "", "not needed: the training starts as many environments as actors", IGNORED, int),
    *LEARNER_FLAGS,
    Flag("num_levels", 0, "`--levels START:START+N`; 0: `--levels all`", status=JOINT, kind=int),
    Flag("start_level", 0, "`--levels`", status=JOINT, kind=int),
    # Validation and checkpoints
    Flag("disable_validation", False, "no `--valid-...` option", status=JOINT, kind=bool),
    Flag(
        "validate_every",
        10,
        "`--valid-every 1M`",
        "the interval is a number of steps; in the original, of minutes",
        JOINT,
        int,
    ),
    Flag("validate_step_every", -1, "`--valid-every`", status=JOINT, kind=int),
    Flag("valid_num_levels", 0, "`--valid-levels START:START+N`; 0: all", status=JOINT, kind=int),
    Flag("valid_start_level", 0, "`--valid-levels`", status=JOINT, kind=int),
    Flag("valid_distribution_mode", "hard", "`--valid-mode`", status=JOINT, choices=MODES),
    Flag("valid_num_episodes", 5, "`--valid-episodes`", status=JOINT, kind=int),
    Flag("valid_num_runs", 1, "`--valid-episodes` = valid_num_episodes x N", status=JOINT, kind=int),
    Flag("save_extra_checkpoint", 50_000_000, "`--keep-at`", status=JOINT, kind=int, commands=TRAIN_EVAL),
    # Tests
    Flag("test_num_levels", 0, "`--levels START:START+N`; 0: all", status=JOINT, kind=int, commands=("eval",)),
    Flag("test_start_level", 0, "`--levels`", status=JOINT, kind=int, commands=("eval",)),
    Flag("test_distribution_mode", "hard", "the mode in `--env`", status=JOINT, choices=MODES, commands=PLAY),
    Flag("eval_extra", False, "`--checkpoint` save_extra_checkpoint", status=JOINT, kind=bool, commands=PLAY),
    Flag(
        "test_model_name",
        None,
        "model_best_val.tar: `--checkpoint best`; model_extra.tar: `--checkpoint` save_extra_checkpoint",
        status=JOINT,
        choices=("model.tar", "model_best_val.tar", "model_extra.tar"),
        commands=PLAY,
    ),
    Flag(
        "test_no_carry_sr",
        False,
        "`--reset-state-every` unroll_length",
        status=JOINT,
        kind=bool,
        commands=("eval",),
    ),
    # Networks
    Flag("use_lstm", False, "`--memory lstm --memory.hidden 256`", status=JOINT, kind=bool),
    Flag("use_delta", False, "`--memory delta --memory.truncate step`", status=JOINT, kind=bool),
    Flag("use_sr", False, "`--memory srwm --memory.truncate step`", status=JOINT, kind=bool),
    Flag("use_psr", False, "`--memory fake-sr`", status=JOINT, kind=bool),
    Flag(
        "use_smfwp",
        False,
        "`--memory sr-delta --memory.truncate step`",
        "the published code of this model ends with an error",
        JOINT,
        bool,
    ),
    Flag(
        "use_no_carry_sr",
        False,
        "`--memory srwm-no-carry --memory.truncate step --memory.reset-interval 1`",
        status=JOINT,
        kind=bool,
    ),
    Flag("use_deep_ff", False, "`--memory deep-ff`", status=JOINT, kind=bool),
    Flag("use_lt", False, "`--memory linear-transformer --memory.truncate step`", status=JOINT, kind=bool),
    Flag("use_delta_rnn", False, "`--memory delta-rnn --memory.truncate step`", status=JOINT, kind=bool),
    Flag("use_rec_delta", False, "`--memory recurrent-delta --memory.truncate step`", status=JOINT, kind=bool),
    Flag(
        "use_dd",
        False,
        "`--memory delta-delta --memory.truncate step`",
        "the published code of this model ends with an error",
        JOINT,
        bool,
    ),
    Flag("keep_dd", False, "", "not used, as in the original", IGNORED, bool),
    Flag("allow_oov", False, "", "not used, as in the original", IGNORED, bool),
    Flag("hidden_size", 128, "`--memory.hidden`", status=JOINT, kind=int),
    Flag("num_layers", 2, "`--memory.layers`", status=JOINT, kind=int),
    Flag("num_head", 4, "`--memory.heads`", status=JOINT, kind=int),
    Flag("dim_head", 32, "`--memory.head-size`", status=JOINT, kind=int),
    Flag("dim_ff", 512, "`--memory.ff`", status=JOINT, kind=int),
    Flag("conv_scale", 1, "`--torso.channels` 16N,32N,32N", status=JOINT, kind=int),
    Flag(
        "dropout",
        0.0,
        "",
        "the memories have no dropout, because actor and learner would then compute different policies; use 0",
        REFUSED,
        float,
    ),
    # Devices and loggers
    Flag(
        "single_gpu",
        False,
        "",
        "not needed: one GPU is the default; for two GPUs, use --device cuda:0 --actor-device cuda:1",
        IGNORED,
        bool,
    ),
    Flag("use_wandb", False, "`--logger wandb --logger.project` project_name", status=JOINT, kind=bool),
    Flag("project_name", None, "`--logger.project`", status=JOINT),
    Flag("job_name", None, "", "the name in Weights & Biases is the name of the run folder, that is xpid", IGNORED),
)
TRAIN = Mode(
    command=("train",),
    rules=(
        environments,
        new_run,
        num_envs,
        levels,
        torso,
        memory,
        validation,
        extra_checkpoint,
        rolling_checkpoints,
        wandb,
    ),
    fixed=(
        ("--torso resnet --torso.subtract-mean off --agent.init torch", "deep ResNet, initialised as by PyTorch"),
        ("--agent.reset-inputs off", "the first inputs of an episode contain the last reward of the previous episode"),
        ("--algo.optimizer rmsprop", "RMSProp of PyTorch"),
        ("--algo.lam 1 --algo.lr-schedule linear", "V-trace without lambda, linear schedule"),
        ("--save-every 0", "only rolling checkpoints"),
    ),
    differences=(
        "the best checkpoint is the one with the highest normalised return; for several games in mode memory, no "
        "normalised return is defined, so there is no best checkpoint",
    ),
)
TEST = Mode(
    command=("eval",),
    rules=(existing_run, test_environment, test_levels, test_checkpoint, test_memory),
    fixed=(("--greedy", "the most probable action is chosen"),),
)
TEST_RENDER = Mode(
    command=("video",),
    rules=(existing_run, test_environment, test_checkpoint),
    fixed=(
        ("--greedy", "the most probable action is chosen"),
        ("--show", "the game is shown in a window; a video is written if there is no display"),
    ),
)
POLYBEAST = Program(
    "torchbeast_procgen.polybeast",
    FLAGS,
    {"train": TRAIN, "test": TEST, "test_render": TEST_RENDER},
    detect=lambda given: ("poly",),  # with this variant, an existing run is resumed
    supports_cluster=True,
)
POLYBEAST_LEARNER = replace(
    POLYBEAST,
    name="torchbeast_procgen.polybeast_learner",
)
