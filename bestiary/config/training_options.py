"""Options of a training run that do not belong to a component: length, rewards, runtime, logging, checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from bestiary.utils.options import option

TRAINING = "training"  # a title of a group in the help of `bestiary train`
ASYNCHRONOUS = ("local", "cluster")  # runtimes in which actors and learner work at the same time

# Each of these functions declares an option of one group of the help. `compared` is explained in `option`.
_training = partial(option, group=TRAINING)
_runtime = partial(option, group="runtime")
_cluster = partial(option, group="cluster (only with --cluster)", runtimes=("cluster",))
_logging = partial(option, group="logging and checkpoints", compared=False)
_validation = partial(option, group="validation during training", compared=False)
_monitor = partial(option, group="reward-hacking monitor (only with --reward or --true-reward)", compared=False)


@dataclass(frozen=True)
class Training:
    """Training options. Each field is a flag of `bestiary train` and a top-level key of config.toml."""

    # --- training ---

    steps: int | None = _training(
        None,
        "number of training steps, over all environments (default: depends on the environment)",
        low=1,
        metavar="STEPS",
    )
    reward: str | None = _training(
        None,
        "reward that the agent is trained on: a weighted sum of reward components (collected=1,expired=-1), a named "
        "reward (fuel:10) or your own function (file.py:name) (default: the environment's reward)",
        metavar="REWARD",
    )
    true_reward: str | None = _training(
        None,
        "reward that is only logged and not used for training; same syntax as --reward; separate several rewards by "
        "semicolons (default: the environment's reward)",
        metavar="REWARD",
    )
    seed: int = _training(
        1, "random seed for environments, initial weights and action sampling", low=0, high=2**63 - 1, compared=False
    )
    num_envs: int = _training(32, "number of environments; on a cluster, the number per actor", low=1, high=100_000)
    device: str = _training(
        "auto",
        "device of the learner: auto (a GPU if there is one), cpu, cuda or cuda:N",
        metavar="DEVICE",
        machine=True,
    )
    precision: str = _training(
        "float32", "floating-point precision of the forward and backward pass", choices=("float32", "bfloat16")
    )
    init_from: str | None = _training(
        None,
        "run from which training starts (warm start): the new run starts with the weights of RUN and, unless other "
        "options are given, has the same agent, environments, frame stack and action set",
        metavar="RUN",
        machine=True,
    )

    # --- runtime ---

    runtime: str = _runtime(
        "local",
        "how the run is executed (local: threads on all cores of this machine; serial: one thread, deterministic; "
        "cluster: Ray processes)",
        choices=("local", "serial", "cluster"),
    )
    pools: int = _runtime(
        2,
        "number of pools (vector environments) into which the environments are split; while one pool steps, the "
        "actions of another pool are computed",
        low=1,
        runtimes=ASYNCHRONOUS,
    )
    actor_threads: int = _runtime(
        0,
        "number of actor threads; 0: one thread, or for on-policy algorithms one per core (at most --pools)",
        low=0,
        runtimes=("local",),
        machine=True,
    )
    actor_device: str = _runtime(
        "auto",
        "device on which actors run the network: auto (same as --device), cpu, cuda or cuda:N",
        metavar="DEVICE",
        runtimes=("local",),
        machine=True,
    )
    learner_threads: int = _runtime(
        0,
        "number of threads that compute gradients; 0: one per core, or one on a GPU",
        low=0,
        runtimes=ASYNCHRONOUS,
        machine=True,
    )
    micro_batch_size: int | None = _runtime(
        None,
        "number of trajectories whose gradient is computed at once; this number changes the speed, but not the result "
        "(except for rounding) (default: on CPUs, the fastest number, which is measured; on a GPU, the whole batch)",
        low=1,
        compared=False,
    )
    max_lag: int | None = _runtime(
        None,
        "maximum policy lag: number of updates by which the weights of the actors may be older than the weights of the "
        "learner; ignored if --lag is given (default: 16; more if the learner makes more updates with each rollout, or "
        "if a cluster needs it to keep all actors busy)",
        low=0,
        runtimes=ASYNCHRONOUS,
    )
    lag: int | None = _runtime(
        None,
        "constant policy lag, in rollouts, which makes the run reproducible (default: the lag varies, see --max-lag)",
        low=0,
        runtimes=ASYNCHRONOUS,
    )
    max_skipped_updates: int = _runtime(
        10,
        "number of consecutive skipped updates after which training stops; an update is skipped if its loss or "
        "gradient is not finite",
        low=1,
        compared=False,
    )

    # --- cluster (only with --cluster) ---

    cluster: str | None = _cluster(
        None,
        "Ray cluster to train on: local (start a cluster on this machine for the run), auto (use the cluster that runs "
        "on this machine) or host:port",
        metavar="ADDRESS",
        compared=False,
        machine=True,
        runtimes=(),
    )
    actors: int = _cluster(1, "number of actor processes; each uses one CPU", low=1, high=100_000)
    min_actors: int = _cluster(
        0,
        "minimum number of actors that must be scheduled before training starts; 0: all actors",
        low=0,
        compared=False,
    )
    learners: int = _cluster(1, "number of learner processes, among which each batch is split evenly", low=1, high=1024)
    inference: str = _cluster(
        "actor",
        "where actions are computed: actor (in each actor) or central (in one inference server for all actors)",
        choices=("actor", "central"),
    )
    max_restarts: int = _cluster(
        10,
        "maximum number of process restarts within 10 minutes; training stops if there are more",
        low=0,
        compared=False,
    )
    actor_timeout: float = _cluster(
        120.0,
        "time without a step after which an actor is replaced, in seconds",
        above=0,
        metavar="SECONDS",
        compared=False,
    )
    learner_timeout: float = _cluster(
        120.0,
        "time without an answer of a learner process after which all learners are restarted, in seconds",
        above=0,
        metavar="SECONDS",
        compared=False,
    )
    trust_open_cluster: bool = _cluster(
        False,
        "allow connecting to a cluster that other machines can reach and that requires no token",
        compared=False,
        machine=True,
    )

    # --- logging and checkpoints ---

    log_every: int = _logging(5_000, "interval between rows of metrics.csv, in steps", low=1, metavar="STEPS")
    save_every: int = _logging(
        1_000_000,
        "interval between permanent checkpoints, in steps; 0: keep only the newest checkpoints, the best checkpoints "
        "and those of --keep-at",
        low=0,
        metavar="STEPS",
    )
    save_minutes: float = _logging(
        5.0,
        "interval between rolling checkpoints, in minutes; only the two newest rolling checkpoints are kept",
        above=0,
        metavar="MINUTES",
    )
    max_failed_saves: int = _logging(
        0,
        "number of consecutive checkpoints that could not be saved, for example because the disk is full, after which "
        "training stops; 0: training continues and tries again",
        low=0,
    )
    keep_at: tuple[int, ...] = _logging(
        (),
        "steps at which a permanent checkpoint is saved, for example 0,150M; 0 is the untrained agent (default: none)",
        low=0,
        metavar="STEPS",
    )
    record: bool = _logging(
        False,
        "record the actions of all games in recordings/ of the run folder, for bestiary video --replay",
        runtimes=("local", "serial"),
    )
    callback: tuple[str, ...] | None = _logging(
        None,
        "your own callback, which is called during training (file.py:Name); give the flag several times, or separate "
        "names by commas, for several callbacks (default: none)",
        metavar="FILE:NAME",
        compared=True,
    )
    logger: tuple[str, ...] | None = _logging(
        None,
        "also log to this tool: tensorboard, wandb, mlflow, trackio or your own file.py:Name; give the flag several "
        "times, or separate names by commas, for several tools (default: none; CSV tables are always written)",
        metavar="NAME",
        machine=True,
    )
    eval_at_end: int = _logging(
        0, "after training, evaluate the agent by playing this number of games per task; 0: no evaluation", low=0
    )
    video_every: int = _logging(
        0,
        "interval between videos of the agent, in steps; each video shows one game of each task; 0: no videos",
        low=0,
        metavar="STEPS",
    )
    video_at_end: bool = _logging(False, "at the end of the training, record a video of one game of each task")

    # --- validation during training ---

    valid_every: int = _validation(
        0,
        "interval between validations, in steps; 0: no validation (or every 1M steps if --valid-levels or --valid-mode "
        "is given)",
        low=0,
        metavar="STEPS",
    )
    valid_levels: str | None = _validation(
        None, "ProcGen: levels to validate on, for example 500:700 (default: the training levels)", metavar="RANGE"
    )
    valid_mode: str | None = _validation(
        None, "ProcGen: mode to validate in, for example hard (default: the training mode)", metavar="MODE"
    )
    valid_episodes: int = _validation(50, "number of games per task that are played in each validation", low=1)
    valid_greedy: bool = _validation(False, "choose the most probable action in validations instead of sampling")

    # --- reward-hacking monitor (only with --reward or --true-reward) ---

    monitor_games: int = _monitor(
        100,
        "number of games between two checks of the monitor, which warns if the training return rises while the true "
        "return falls; 0: no monitor",
        low=0,
        high=100_000,
    )
    monitor_windows: int = _monitor(
        4,
        "number of windows: each check of the monitor uses the last --monitor-windows x --monitor-games games",
        low=1,
        high=1000,
    )

    @property
    def total_pools(self) -> int:
        """Return the number of vector environments of all actors together."""
        return 1 if self.runtime == "serial" else self.actors * self.pools

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Return the numbers of environments in the vector environments of one actor. They differ by at most 1."""
        count = 1 if self.runtime == "serial" else self.pools
        size, rest = divmod(self.num_envs, count)
        return tuple(size + (index < rest) for index in range(count))

    @property
    def pool_size(self) -> int:
        """Return the number of environments in the smallest vector environment. Usually, all are equally large."""
        return self.pool_sizes[-1]

    @property
    def has_equal_pools(self) -> bool:
        """Return whether all vector environments have the same number of environments."""
        return self.pool_sizes[0] == self.pool_sizes[-1]

    def envs_of_pool(self, index: int) -> range:
        """Return the indices of the environments in a vector environment, counted over all environments of the run.

        `index` is the index of the vector environment, counted over the vector environments of all actors.
        """
        sizes = self.pool_sizes
        actor, own_index = divmod(index, len(sizes))
        first = actor * self.num_envs + sum(sizes[:own_index])
        return range(first, first + sizes[own_index])


# If two runs differ only in these options, they count as repetitions of one experiment.
UNCOMPARED = tuple(f.name for f in fields(Training) if not f.metadata["compared"])


def is_compared(key: str) -> bool:
    """Return whether two runs with different values of a key, such as `memory.hidden`, are different experiments."""
    # The options of a logger, for example `logger.project`, are not compared, as the option `logger`.
    return key.partition(".")[0] not in UNCOMPARED


def group_key(settings: Mapping[str, Any], *ignored: str) -> str:
    """Return a key of the experiment: two runs with the same key are repetitions of one experiment.

    The key contains all settings as JSON, except the options in UNCOMPARED and `ignored`.
    """
    return json.dumps({k: v for k, v in settings.items() if is_compared(k) and k not in ignored}, sort_keys=True)


def unused_options(runtime: str) -> set[str]:
    """Return the training options that have no effect in a runtime."""
    return {f.name for f in fields(Training) if f.metadata["runtimes"] and runtime not in f.metadata["runtimes"]}
