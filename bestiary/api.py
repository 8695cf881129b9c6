"""Python API: functions that train, resume, load and evaluate runs. The command line calls the same functions."""

import os
from typing import Any

from bestiary.agents.trained_policy import Policy
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten
from bestiary.config.training_options import group_key
from bestiary.distributed.cluster_training import connect_cluster, train_on_cluster
from bestiary.envs.as_sb3 import to_sb3
from bestiary.envs.registry import make_env, make_vec
from bestiary.evaluation.evaluate import evaluate
from bestiary.evaluation.result_tables import print_evaluation
from bestiary.evaluation.results import Evaluation
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.config_changes import ConfigChange, find_changes
from bestiary.runs.loggers import check_loggers
from bestiary.runs.machine_options import choose_machine_options, machine_values, remember_run, with_machine_options
from bestiary.runs.option_sources import merge_sources
from bestiary.runs.run import Run, RunLocation, create_run, open_run, set_machine_options, update_config
from bestiary.runs.tables import Table
from bestiary.training.callbacks.user_callback import make_user_callbacks
from bestiary.training.config_summary import (
    check_user_envs,
    describe_rewards,
    describe_warm_start,
    note_unequal_sizes,
    warn_about_clipping,
)
from bestiary.training.devices import check_devices
from bestiary.training.run_training import auto_tune, train_run
from bestiary.training.saved_state import check_saved_state
from bestiary.training.validation import check_validation
from bestiary.utils import plugins
from bestiary.utils.console import note
from bestiary.utils.errors import RunError, UserError

__all__ = [
    "Evaluation",
    "Policy",
    "Run",
    "RunError",
    "Table",
    "UserError",
    "evaluate",
    "load",
    "make_env",
    "make_vec",
    "resume",
    "to_sb3",
    "train",
]


def train(
    *envs: str,
    name: str | None = None,
    run_dir: str | None = None,
    if_exists: str = "error",
    trust_code: bool = False,
    **options: Any,
) -> Run:
    """Train a new run and return it.

    Args:
        envs: names of environments. If there are several, one agent is trained on all of them as its tasks.
        name: name of the run; its folder is runs/NAME. The default name is composed of environment, agent and date.
        run_dir: path of the run folder. It replaces runs/NAME.
        if_exists: what to do if the run folder already exists and is not empty. "error": raise UserError. "resume":
            resume the run in this folder. "new": append a number to the name.
        trust_code: plug-ins given in `envs` or `options` are always executed. Other plug-ins come from a config file or
            from the run of `init_from`. They are executed only if you have used them before or `trust_code` is True.
        options: options of `bestiary train` with underscores instead of hyphens, for example `sticky=0.25`,
            `preset="hello"` or `config="runs/a/config.toml"`. Options of components are given as a dict
            (`memory={"name": "lstm", "hidden": 512}`) or with a dot (`**{"memory.hidden": 512}`).

    Raises:
        UserError: options are invalid. The exception lists all problems.
        RunError: the training cannot continue.
        KeyboardInterrupt: a signal stopped the run before its end. The run has saved a checkpoint and can be resumed.
    """
    given, origin = merge_sources({**({"env": list(envs)} if envs else {}), **options}, trust_code=trust_code)
    if if_exists not in ("error", "resume", "new"):
        raise UserError(f"if_exists={if_exists!r}: expected error, resume or new")
    try:
        location = RunLocation(name, run_dir, if_exists)
    except ValueError as error:
        raise UserError(str(error)) from error
    return start(resolve(given, origin), location)


def load(path: str, trust_code: bool = False) -> Run:
    """Open a run folder, or a trained agent that comes with the package (for example `zoo/pong`), and return the run.

    A run may use plug-ins. Plug-ins that you have not used before are executed only if `trust_code` is True.
    """
    return open_run(path, trust_code)


def start(config: Config, location: RunLocation = RunLocation()) -> Run:
    """Train a new run to its end and return it. If the run exists and `location.if_exists` is "resume", resume it.

    Raises:
        UserError: the config is invalid, the run folder cannot be used (see RunLocation), or the run to resume has
            another config or seed.
        RunError: the training cannot continue.
        KeyboardInterrupt: a signal stopped the run before its end. The run has saved a checkpoint and can be resumed.
    """
    check_loggers(config)
    check_validation(config)
    make_user_callbacks(config)  # raises UserError if a callback is not usable
    check_devices(config)
    check_user_envs(config)
    note_unequal_sizes(config)
    agent = config.make_agent()  # to find errors in components before the run folder is created; not used for training
    if not config.rewards.is_default:
        note(describe_rewards(config, agent))
        warn_about_clipping(config)
    if config.training.init_from is not None:
        note(describe_warm_start(config))
    if "critic" in config.components and config.components["critic"].name == "popart" and len(config.envs) == 1:
        note("note: there is only one task: PopArt normalises its returns, but has no other tasks to balance")
    with connect_cluster(config) as ray:
        run, exists = create_run(config, location)
        if exists:
            steps, saved_steps = config.training.steps, run.config.training.steps
            same = group_key(flatten(run.config.tables()), "steps") == group_key(flatten(config.tables()), "steps")
            if not same or run.config.training.seed != config.training.seed:
                raise UserError(f"{run.path} contains a run with another config or seed; choose another --name")
            set_machine_options(run, with_machine_options(run.config, machine_values(config)))
            trained = _resume(run, steps if steps != saved_steps else None, None, ray)
        else:
            trained = True
            with run.lock():
                if run.checkpoints:
                    raise UserError(f"{run.path}: another process has started this run; choose another --name")
                run.config = config
                remember_run(run, config)
                auto_tune(run)
                _train(run, run.config, None, ray)
    return run_final_tasks(run) if trained else run


def resume(
    run: Run, steps: int | None = None, checkpoint: int | None = None, accept_changes: bool = False, **machine: Any
) -> Run:
    """Resume a run from its newest checkpoint, train it to its end, and return it.

    Args:
        run: run to resume.
        steps: new total number of steps, or None to keep the total of the run.
        checkpoint: resume from the checkpoint nearest to this step. The default is the newest checkpoint. Later
            checkpoints are renamed to abandoned-*.
        accept_changes: resume although config.toml has other options or another seed than the checkpoint, or although
            another run saved the checkpoint.
        machine: options of this machine (see MACHINE_OPTIONS), for example `device="cpu"` or `logger="wandb"`. For an
            option that is not given, the value in config.toml is used if the run was already trained with this value on
            this machine. Otherwise the default is used.

    Raises:
        UserError: the run cannot be resumed as requested.
        RunError: the training cannot continue.
        KeyboardInterrupt: a signal stopped the run before its end. The run has saved a checkpoint and can be resumed.
    """
    set_machine_options(run, choose_machine_options(run, machine))
    check_loggers(run.config)
    make_user_callbacks(run.config)  # raises UserError if a callback is not usable
    check_devices(run.config)
    with connect_cluster(run.config) as ray:
        trained = _resume(run, steps, checkpoint, ray, accept_changes)
    return run_final_tasks(run) if trained else run


def _resume(run: Run, steps: int | None, checkpoint_steps: int | None, ray: Any, accept_changes: bool = False) -> bool:
    """Resume a run and train it to its end. Return True, or False if the run was already finished.

    Args:
        run: run to resume.
        steps: new total number of steps, or None to keep the total of the run.
        checkpoint_steps: resume from the checkpoint nearest to this step; None: the newest checkpoint.
        ray: the connected Ray module, or None if the run uses no cluster.
        accept_changes: whether the configuration may differ from the configuration of the checkpoint.
    """
    with run.lock():
        for name in checkpoints.remove_unfinished(run.path / "checkpoints"):
            note(f"removed the incomplete checkpoint {name}")
        checkpoint = _choose_checkpoint(run, checkpoint_steps)
        done_steps = checkpoint.steps if checkpoint else 0
        total_steps = run.config.training.steps
        if steps is not None and steps <= done_steps:
            raise UserError(f"--steps {steps}: {run.path} has already done {done_steps} steps; choose a larger total")
        if steps is not None and steps != total_steps:
            update_config(run, steps=steps)
        elif total_steps is not None and done_steps >= total_steps:
            note(
                f"{run.path} is finished: {done_steps} of {total_steps} steps; "
                f"to train longer: bestiary resume {run.path} --steps N"
            )
            return False
        changes = _check_identity(run, checkpoint, accept_changes) if checkpoint else []
        for change in changes:
            if change.option != "steps":
                note(f"note: this option has changed since the checkpoint was saved: {change}")
        if run.config.training.steps != total_steps:
            algorithm = run.config.components["algo"].options
            fixed = isinstance(algorithm, ActorCriticOptions) and algorithm.lr_schedule_steps is not None
            stretched = "" if fixed else "; the learning-rate schedule is stretched to the new total"
            note(f"total steps {total_steps} -> {steps}{stretched}")
        note(f"resuming {run.path} at step {done_steps}")
        remember_run(run, run.config)
        _train(run, run.config, checkpoint, ray)
    return True


def _check_identity(run: Run, checkpoint: Checkpoint, accept_changes: bool) -> list[ConfigChange]:
    """Compare a checkpoint with its run. Return the options that differ between the checkpoint and config.toml.

    Unless `accept_changes` is True, raise UserError if another run saved the checkpoint, or if the seed or another
    option that affects the experiment differs.
    """
    state = checkpoint.load_state()
    check_saved_state(state)
    changes = find_changes(state["config"], run.config.tables())
    problems = [
        f"{change.option}: {change.old} in the checkpoint, {change.new} in config.toml"
        for change in changes
        if change.changes_experiment
    ]
    saved_id = state.get("run_id", "")
    if saved_id and run.id and saved_id != run.id:
        problems.append(f"run ID: {saved_id} in the checkpoint, {run.id} in the run folder")
    if problems and not accept_changes:
        raise UserError(
            f"{checkpoint.path} does not belong to this run; to resume from it nevertheless, add --accept-changes:",
            *problems[:8],
        )
    return changes


def _choose_checkpoint(run: Run, steps: int | None) -> Checkpoint | None:
    """Return the checkpoint nearest to `steps` (None: the newest checkpoint). If there is no checkpoint, return None.

    Raise UserError if the folder with the checkpoints cannot be read: training from step 0 would remove the tables.
    """
    folder = run.path / "checkpoints"
    if os.path.lexists(folder):
        try:
            os.listdir(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be read: {error.strerror or error}") from error
    if not run.checkpoints and steps is None:
        note(f"{run.path} has no checkpoint; training starts from step 0")
        return None
    return checkpoints.choose(run.path, steps)


def _train(run: Run, config: Config, checkpoint: Checkpoint | None, ray: Any) -> None:
    """Train a run from a checkpoint, or from step 0 if `checkpoint` is None. Use Ray unless `ray` is None."""
    if checkpoint is not None:
        checkpoint = Checkpoint(checkpoint.path.absolute())
    try:
        with run.absolute_path():
            if ray is None:
                train_run(run, config, checkpoint)
            else:
                train_on_cluster(run, config, checkpoint, ray)
    except SystemExit as error:  # a plug-in called sys.exit; status 0 would mean that the training is finished
        cause = plugins.describe_error(error) or plugins.error_line(error)
        raise RunError(f"code of the run ended the training: {cause}") from error


def run_final_tasks(run: Run) -> Run:
    """Evaluate a finished run if --eval-at-end is set. Return the run."""
    if run.config.training.eval_at_end:
        print_evaluation(evaluate(run, episodes=run.config.training.eval_at_end))
    return run
