"""Translation of MonoBeast and PolyBeast, the programs of TorchBeast and its forks (PopArt, reward misspecification).

Each public function whose only argument is `values` is a rule (`Mode.rules`). A rule gets the values of the original
flags and returns words of the Bestiary command.
"""

import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bestiary.compat.flag_types import Mode, Program, Values, Words, format_value
from bestiary.compat.num_envs import count_cluster_envs, count_envs
from bestiary.compat.torchbeast_flags import FLAGS, expand_path
from bestiary.envs.atari_games import action_names
from bestiary.envs.original_names import GROUPS, bestiary_names
from bestiary.utils.cpu import num_cores
from bestiary.utils.errors import UserError

AGENT_TYPES = {
    **dict.fromkeys(("aaa", "attention_augmented", "attention_augmented_agent"), "aaa"),
    **dict.fromkeys(("rn", "res", "resnet", "res_net"), "resnet"),
}
NUM_SEEDS = 1_000_000
FORK_TITLES = {"popart": "PopArt fork", "reward": "reward-misspecification fork"}

# --- environments, runs, actors ---


def task_names(text: str) -> tuple[str, ...]:
    """Return the Bestiary names of the games in `text`, a value of --env. `text` may be a group such as "six"."""
    if text == "Mock":
        raise UserError("--env Mock: Bestiary has no environment without a game; use a toy, for example toy/catch")
    names = bestiary_names(text) or tuple(text.split(",") if "/" in text else ())
    if not names:
        advice = "; write the games, separated by commas" if text == "all" else " (bestiary list envs shows all)"
        raise UserError(f"--env {text}: not a known game; expected for example PongNoFrameskip-v4{advice}")
    return names


def environments(values: Values) -> Words:
    """Return the names of the environments of a training."""
    return Words(task_names(values["env"]))


def new_run(values: Values) -> Words:
    """Return the options for the run folder SAVEDIR/XPID and for the seed of a training.

    The seed is computed from the name of the run. So runs with different names have different initial weights, as in
    the original. If the command is repeated to resume the run, it has the same seed.
    """
    xpid = values["xpid"] or f"torchbeast-{time.strftime('%Y%m%d-%H%M%S')}"
    seed = str(zlib.crc32(xpid.encode()) % NUM_SEEDS)
    words = ("--run-dir", expand_path(f"{values['savedir']}/{xpid}"), "--seed", seed)
    differences = (f"seed {seed}: computed from the name of the run; the original draws a random seed",)
    if "popart" in values.variants or "poly" in values.variants:
        return Words((*words, "--if-exists", "resume"), differences)
    return Words(
        words, (*differences, "an existing run with this xpid is not overwritten: the command stops with an error")
    )


def existing_run(values: Values) -> Words:
    """Return the run folder SAVEDIR/XPID of a finished training."""
    if values["xpid"] is None:
        raise UserError("--xpid: required, because it is the name of the run folder in --savedir")
    return Words((expand_path(f"{values['savedir']}/{values['xpid']}"),))


def played_environments(values: Values) -> Words:
    """Return the option for the environments of a test, which may differ from the training environments."""
    return Words(("--env", *task_names(values["env"])))


def actors(tasks: Sequence[str], wanted: int, name: str, cluster: str | None) -> Words:
    """Return the options for as many environments as the original has actors.

    Args:
        tasks: names of the environments.
        wanted: number of actors or environment servers of the original.
        name: flag of the original that gives this number, for messages.
        cluster: value of --cluster, or None. With a cluster, each actor process plays all tasks, so with several tasks
            there are fewer than `wanted` actor processes (`count_cluster_envs`). With the value "local", there is at
            most one actor process per core.
    """
    words: tuple[str, ...]
    differences: tuple[str, ...] = ()
    if cluster is None:
        total = count_envs(wanted, len(tasks))
        words = ("--num-envs", str(total))
        reason = f"one for each of the {len(tasks)} tasks"
    else:
        counts = count_cluster_envs(wanted, len(tasks), num_cores() if cluster == "local" else wanted)
        total = counts.actors * counts.num_envs
        words = ("--cluster", cluster, "--actors", str(counts.actors), "--num-envs", str(counts.num_envs))
        words = (*words, "--pools", "1")
        reason = f"the same number in each of {counts.actors} actor processes"
        if counts.actors != wanted:
            at_core_limit = cluster == "local" and counts.actors == num_cores()
            limit = "one per core of this machine" if at_core_limit else "each of which plays all tasks"
            differences = (f"{name} {wanted}: {counts.actors} actor processes, {limit}",)
    if total != wanted:
        differences += (f"{name} {wanted}: {total} environments, {reason}",)
    return Words(words, differences)


def num_envs(values: Values) -> Words:
    """Return the options for the number of environments of a training."""
    tasks = task_names(values["env"])
    # In MonoBeast of the PopArt fork, num_actors is the number of actors per game.
    factor = len(tasks) if "popart-mono" in values.variants else 1
    return actors(tasks, factor * values["num_actors"], "num_actors", values.cluster)


def num_servers(values: Values) -> Words:
    """Return the options for a cluster whose actors correspond to the environment servers of PolyBeast."""
    tasks = task_names(values["env"])
    return actors(tasks, values["num_servers"], "num_servers", values.cluster or "local")


# --- networks and rewards ---


def network(values: Values) -> Words:
    """Return the options of the agent, its torso and its memory."""
    kind = AGENT_TYPES.get(values["agent_type"], "shallow")
    if kind == "aaa":
        return Words(("--agent", "aaa", "--agent.subtract-mean", "off"))
    words = ["--torso", kind, "--torso.subtract-mean", "off", "--agent.init", "torch"]
    # In TorchBeast, the first inputs of an episode contain the last reward and action of the previous episode.
    words += ["--agent.reset-inputs", "off"]
    if kind == "resnet" and values.fork == "popart" and values["reward_clipping"] == "none":
        words += ["--agent.clamp-reward", "off"]
    width = values["hidden_size"]
    if values.fork == "reward":
        words += ["--torso.width", str(width), "--torso.depth", str(values["num_layers"])]
    if values["use_lstm"]:
        words += ["--memory", "lstm"]
        if kind == "shallow":
            words += ["--memory.layers", "2", "--memory.hidden", str(width + 1 + _num_actions(values))]
        else:
            words += ["--memory.layers", "1", "--memory.hidden", "256"]
    return Words(tuple(words))


def _num_actions(values: Values) -> int:
    """Return the number of actions of the games, or 18 (all actions) if the games have different actions."""
    games = [name.removeprefix("atari/") for name in task_names(values["env"])]
    action_sets = {action_names(game, full=False) for game in games}
    return len(next(iter(action_sets))) if len(action_sets) == 1 else len(action_names(games[0], full=True))


def frames(values: Values) -> Words:
    """Return the options for the size and the format of the frames."""
    words: list[str] = []
    if {"frame_height", "frame_width"} & values.given:
        words += ["--frame-size", f"{values['frame_height']}x{values['frame_width']}"]
    if values["aaa_input_format"] != "gray_stack":
        words += ["--gray", "off"]
    if values["aaa_input_format"] == "rgb_last":
        words += ["--frame-stack", "1"]
    return Words(tuple(words))


def critic(values: Values) -> Words:
    """Return the options of PopArt."""
    if not values["use_popart"]:
        return Words()
    words = shlex.split("--critic popart --critic.beta 4e-4 --critic.average deviations --critic.debias off")
    if values["reward_clipping"] != "none":
        return Words(
            tuple(words),
            (
                "--use_popart: rewards are also clipped, because the fork does so unless --reward_clipping none is "
                "given; its published models were trained with --reward_clipping none",
            ),
        )
    return Words(tuple(words))


def proxy_reward(values: Values) -> Words:
    """Return the options for the proxy reward and the true reward of the reward-misspecification fork."""
    if values.fork != "reward":
        return Words()
    fuel, move, true_move = (values[name] for name in ("fuel_multiplier", "move_penalty", "true_move_penalty"))
    differences = []
    if fuel < 0:
        reward = f"pacifist:{format_value(-fuel)}"
    elif fuel != 1:
        reward = f"fuel:{format_value(fuel)}"
        differences.append(
            "fuel_multiplier: a depot also counts if another object is shot in the same step; in the fork, a depot "
            "counts only in steps that score exactly 80"
        )
    else:
        reward = _move_reward(move)
    words = ["--reward", reward, "--algo.reward-scale", "1"]
    if true_move:
        words += ["--true-reward", f"score=1; {_move_reward(true_move)}"]
    if fuel == 1 and not {"fuel_multiplier", "move_penalty"} & values.given:
        differences.append(
            "neither fuel_multiplier nor move_penalty is given: the reward is 10 in each step, as in the fork"
        )
    if values["reward_clipping"] == "abs_one":
        differences.append(
            "the proxy reward is clipped to [-1,1], as in the fork, so most values of the proxy flags have the same "
            "effect (docs/rewards.md)"
        )
    return Words(tuple(words), tuple(differences))


def _move_reward(penalty: float) -> str:
    return f"smooth:{format_value(penalty)}" if penalty >= 0 else f"center:{format_value(-penalty)}"


def time_limit(values: Values) -> Words:
    """Return the option for the time limit of Gym: 400,000 frames, in Space Invaders 300,000 frames."""
    return Words(("--time-limit", "75k" if task_names(values["env"]) == ("atari/SpaceInvaders",) else "100k"))


# --- checkpoints and tests ---


def checkpoint_schedule(values: Values) -> Words:
    """Return the options for checkpoints.

    A rolling checkpoint is saved every 10 minutes, a permanent one every `save_model_every_nsteps` steps.
    """
    interval = values["save_model_every_nsteps"]
    words = ["--save-every", format_value(interval)]
    if interval:
        words += ["--keep-at", "0"]
    if not values["disable_checkpoint"]:
        words += ["--save-minutes", "10"]
    return Words(tuple(words))


def test_episodes(values: Values) -> Words:
    """Return the option for the number of games of a test."""
    return Words(("--episodes", str(values["num_episodes"])))


def audit_episodes(values: Values) -> Words:
    """Return the option for the number of games of an audit.

    With --num_episodes N (default: 4), the fork plays 15 N lives. A game of River Raid has 4 lives, so this is 15 N / 4
    games.
    """
    num_episodes = values["num_episodes"] if "num_episodes" in values.given else 4
    games = max(1, round(15 * num_episodes / 4))
    return Words(
        ("--episodes", str(games)),
        (f"{games} games: the fork plays 15 x {num_episodes} lives, and a game of River Raid has 4 lives",),
    )


def lr_schedule(values: Values) -> Words:
    """Return the option for the learning-rate schedule: staggered in the reward-misspecification fork, else linear.

    In this fork, the schedule always ends after 100M steps, even if the run is longer or shorter.
    """
    if values.fork == "reward":
        return Words(("--algo.lr-schedule", "staggered", "--algo.lr-schedule-steps", "100M"))
    return Words(("--algo.lr-schedule", "linear"))


def fork_note(values: Values) -> Words:
    """Return a message that names the fork whose defaults are used, and the reason for this choice."""
    if not values.fork:
        return Words()
    own = [f"--{flag.name}" for flag in FLAGS if flag.fork == values.fork and flag.name in values.given]
    reason = own[0] if own else "several games"
    return Words((), (f"defaults: those of the {FORK_TITLES[values.fork]} (because of {reason})",))


# --- programs ---

TRAIN_FIXED = (
    ("--algo.optimizer rmsprop", "RMSProp of PyTorch"),
    ("--algo.lam 1", "V-trace without lambda"),
)
TRAIN_DIFFERENCES = (
    "episodes.csv has both lives and whole games; the original program logs only the returns of lives",
    "Atari: the start of a life and the end at the time limit differ slightly (docs/atari.md)",
)
NETWORK_RULES = (network, frames, critic, proxy_reward, lr_schedule, checkpoint_schedule, time_limit, fork_note)
TRAIN = Mode(
    command=("train",),
    rules=(environments, new_run, num_envs, *NETWORK_RULES),
    fixed=TRAIN_FIXED,
    differences=TRAIN_DIFFERENCES,
)
LEARNER = replace(
    TRAIN,
    differences=(
        "no environment servers are needed, because this command steps the environments itself; for actor processes on "
        "one or several machines, use bestiary compat --cluster local (or auto, or HOST:PORT, see docs/cluster.md)",
        *TRAIN_DIFFERENCES,
    ),
)
SERVERS = replace(
    TRAIN,
    rules=(environments, new_run, num_servers, *NETWORK_RULES),
    differences=(
        "environment servers are not started separately: torchbeast.polybeast_learner steps its environments itself. "
        "The printed command trains with actor processes on a Ray cluster instead; it runs only if you use bestiary "
        "compat --cluster local (several machines: auto or HOST:PORT, see docs/cluster.md)",
        *TRAIN_DIFFERENCES,
    ),
    starts=False,
    runs_with_cluster=True,
)
TEST = Mode(
    command=("eval",),
    rules=(existing_run, played_environments, test_episodes),
    fixed=(("--greedy", "the most probable action is chosen"),),
    differences=("episodes are whole games; in the original, they are lives",),
)
TEST_RENDER = Mode(
    command=("video",),
    rules=(existing_run, played_environments),
    fixed=(
        ("--greedy", "the most probable action is chosen"),
        ("--show", "the game is shown in a window; a video is written if there is no display"),
    ),
)
RECORD = Mode(
    command=("eval",),
    rules=(existing_run, played_environments),
    fixed=(
        ("--greedy --record --episodes 1 --seed 0", "one game, with the most probable actions"),
        ("--noop-max 20 --noop-mode fixed", "20 no-op frames at the start"),
    ),
    differences=(
        "the actions of the game are recorded; to draw it: bestiary video RUN --replay RUN/recordings/NAME.json",
    ),
    fork="popart",
)
AUDIT = Mode(
    command=("audit",),
    rules=(existing_run, audit_episodes),
    fixed=(("--greedy", "the most probable action is chosen"),),
    differences=(
        "only the run --xpid is audited; for several runs, give their folders to bestiary audit",
        "audit.csv, audit.json and figures are written to the folder audit; the fork writes one JSON file",
    ),
    fork="reward",
)
ENV_INFO = Mode(
    command=(),
    differences=(
        "env_info: in Python, bestiary.make_env('atari/Pong').action_spec.names has the names of the actions",
    ),
    fork="popart",
    starts=False,
)


def _variants(kind: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `Values.variants` for a program of TorchBeast. `kind` is "mono" (MonoBeast) or "poly" (PolyBeast)."""
    fork = given["fork"]
    if not fork and ("," in given.get("env", "") or given.get("env") in GROUPS):
        fork = "popart"  # only this fork trains on several games
    return (f"{fork}-{kind}", fork, kind) if fork else (kind,)


POPART_TESTS = {
    "test": replace(TEST, fork="popart"),
    "test_render": replace(TEST_RENDER, fork="popart"),
    "record": RECORD,
    "env_info": ENV_INFO,
}
MONOBEAST = Program(
    "torchbeast.monobeast",
    FLAGS,
    {"train": TRAIN, "test": TEST, "test_render": TEST_RENDER, "eval": AUDIT},
    detect=partial(_variants, "mono"),
    supports_cluster=True,
)
POLYBEAST = Program(
    "torchbeast.polybeast",
    FLAGS,
    {"train": TRAIN, **POPART_TESTS},
    detect=partial(_variants, "poly"),
    supports_cluster=True,
)
POLYBEAST_LEARNER = replace(
    POLYBEAST, name="torchbeast.polybeast_learner", modes={"train": LEARNER, "test": TEST, "test_render": TEST_RENDER}
)
POLYBEAST_ENV = replace(POLYBEAST, name="torchbeast.polybeast_env", modes={"train": SERVERS})
