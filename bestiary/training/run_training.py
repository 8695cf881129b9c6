"""Training of a run on this machine: build actors, learner, callbacks and session, load the checkpoint, and train."""

from typing import Any

from bestiary.config.config import Config
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.recordings import make_recording_wrapper
from bestiary.runs.run import Run, load_weights, update_config
from bestiary.training import local, serial
from bestiary.training.actor import Actor
from bestiary.training.callbacks.factory import make_callbacks
from bestiary.training.factory import env_seeds, make_actors_and_learner, make_thread_layout, restarts_environments
from bestiary.training.interrupts import Interrupted
from bestiary.training.learner import Learner
from bestiary.training.micro_batch_tuning import choose_micro_batch_size
from bestiary.training.session import Session
from bestiary.training.stall_monitor import StallMonitor
from bestiary.training.stored_trajectories import check_stored_trajectories
from bestiary.utils.console import note


def train_run(run: Run, config: Config, checkpoint: Checkpoint | None) -> None:
    """Train a run with the serial or the local runtime. Start from `checkpoint` or, if it is None, from step 0."""
    training = config.training
    actors, learner = make_actors_and_learner(config, checkpoint.steps if checkpoint else None)
    if training.record:
        _record_environments(run, config, actors, checkpoint.steps if checkpoint else 0)
    saved_state = load_checkpoint(config, learner, checkpoint)
    callbacks = make_callbacks(config)
    actor = actors[0]
    try:
        with StallMonitor(actors):
            if training.runtime == "serial":
                _start_serial_actor(actor, checkpoint, learner)
                with Session(run, config, learner, actor.save, callbacks, saved_state) as session:
                    serial.train(actor, learner, session)
            else:
                with Session(run, config, learner, dict, callbacks, saved_state) as session:
                    local.train(actors, learner, session, make_thread_layout(config))
    finally:
        for actor in actors:
            actor.pool.close()
    raise_if_interrupted(run, session)


def load_checkpoint(config: Config, learner: Learner, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Load a checkpoint into a learner and return the content of its state.json. Without a checkpoint, return None."""
    if checkpoint is None:
        return None
    load_weights(learner.agent, checkpoint)
    state = checkpoint.load_state()
    tensors = checkpoint.load_learner()
    check_stored_trajectories(config, tensors["algorithm"], checkpoint.path)
    learner.load(tensors, state)
    return state


def raise_if_interrupted(run: Run, session: Session) -> None:
    """If a signal stopped the run before its last step, print how to resume the run and raise Interrupted."""
    if session.interrupts.received is not None and session.learner.steps < session.total_steps:
        note(f"resume with: bestiary resume {run.shown_path}")
        raise Interrupted(session.interrupts.received)


def _start_serial_actor(actor: Actor, checkpoint: Checkpoint | None, learner: Learner) -> None:
    """Start the actor of a serial run. If there is a checkpoint, restore the actor's state from it."""
    if checkpoint is None:
        return actor.start()
    if not actor.pool.saveable:
        note(
            "note: the state of these environments cannot be saved, so they start new episodes; "
            "the resumed run will differ from an uninterrupted run"
        )
    actor.version = learner.version
    actor.load(checkpoint.load_actor(), learner.steps)


def _record_environments(run: Run, config: Config, actors: list[Actor], start_step: int) -> None:
    """Wrap the environments of the actors so that all actions are written to recordings.

    If a resumed run restores the state of its environments, the existing recordings are continued.
    """
    restarted = restarts_environments(config, start_step, actors[0].pool)
    first_step = start_step if restarted else 0
    recorded_steps = 0 if restarted else start_step // config.training.num_envs
    for index, (actor, seed) in enumerate(zip(actors, env_seeds(config, first_step), strict=True)):
        actor.pool = make_recording_wrapper(
            actor.pool,
            run.path / "recordings" / f"train-{first_step:012d}-{index}.json",
            list(config.envs),
            config.env_options,
            seed,
            config.rewards,
            num_steps=recorded_steps,
            run=run.name,
            policy="training",
            first_env=config.training.envs_of_pool(index).start,
        )


def auto_tune(run: Run) -> None:
    """Choose the micro-batch size (see `micro_batch_tuning.py`) and write it to the run's config."""
    update_config(run, micro_batch_size=choose_micro_batch_size(run.config))
