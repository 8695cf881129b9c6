"""From a config to a finished run: build the parts, train, and do what was asked for at the end."""

import numpy as np
import torch

from bestiary.agents.agent import count_parameters
from bestiary.config import Config
from bestiary.console import note
from bestiary.errors import UserError
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Place, Run, create_run, extend, load_weights, unused
from bestiary.runs.loggers import check_loggers
from bestiary.runtime import serial
from bestiary.runtime.actor import Actor
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.learner import Learner
from bestiary.runtime.session import Session, resume_note


def start(config: Config, place: Place = Place()) -> Run:
    """Train a new run to its end."""
    check_loggers(config)
    describe(config)  # builds everything once, so that what cannot be built is refused before a folder is made
    run, exists = create_run(config, place)
    if exists:
        mine, theirs = config.training, run.config.training
        if (run.config.group("steps"), theirs.seed) != (config.group("steps"), mine.seed):
            raise UserError(f"{run.path} is a run of another configuration or seed; choose another --name")
        return resume(run, mine.steps if mine.steps != theirs.steps else None)
    with run.writing():
        if run.checkpoints:
            raise UserError(f"{run.path} has been trained in the meantime")
        _train(run, config, None)
    return finish(run)


def resume(run: Run, steps: int | None = None, checkpoint: int | None = None) -> Run:
    """Go on with a run from its newest checkpoint (or an earlier one), to its total of steps or a new one."""
    check_loggers(run.config)
    with run.writing():
        for name in checkpoints.remove_unfinished(run.path / "checkpoints"):
            note(f"note: removed {name}, a save that was cut off")
        chosen = _chosen(run, checkpoint)
        done = chosen.steps if chosen else 0
        total = run.config.training.steps
        if steps is not None and steps <= done:
            raise UserError(f"--steps {steps}: {run.path} has done {done} steps already; give a larger total")
        if steps is not None and steps != total:
            extend(run, steps)
            note(f"total steps {total} -> {steps}; the learning-rate schedule is stretched to the new total")
        elif total is not None and done >= total:
            note(f"{run.path} is finished: {done} of {total} steps; bestiary resume {run.path} --steps N goes further")
            return run
        note(f"resuming {run.path} at step {done}")
        _train(run, run.config, chosen)
    return finish(run)


def _chosen(run: Run, steps: int | None) -> Checkpoint | None:
    """The checkpoint to go on from; what came after it in the tables and the ladder is not part of the run any more."""
    if not run.checkpoints and steps is None:
        return None
    chosen = checkpoints.choose(run.path, steps)
    for later in run.checkpoints:
        if later.steps > chosen.steps:
            aside = unused(later.path.with_name(f"abandoned-{later.path.name}"))
            later.path.rename(aside)
            note(f"note: {later.path.name} is set aside as {aside.name}")
    return chosen


def _train(run: Run, config: Config, checkpoint: Checkpoint | None) -> None:
    actor, learner = build(config, checkpoint.steps if checkpoint else 0)
    past = None
    if checkpoint is None:
        actor.start()
    else:
        load_weights(learner.agent, checkpoint)
        past = checkpoint.state()
        learner.load({"model": checkpoint.model(), "optimizer": checkpoint.optimizer()}, past)
        actor.version = learner.version
        if not actor.pool.saveable:
            note(
                "note: these environments cannot be saved, so they start new episodes; the resumed run is not bit for bit"
            )
        actor.load(checkpoint.actor(), learner.steps)
    try:
        with Session(run, config, actor, learner, past) as session:
            serial.train(actor, learner, session, config.parts["algo"].options.batch_size)
    finally:
        actor.pool.close()
    if session.interrupts.received is not None and learner.steps < session.total:
        resume_note(run)
        raise Interrupted(session.interrupts.received)


def build(config: Config, at_step: int = 0) -> tuple[Actor, Learner]:
    """The actor and learner of a run, fresh; each random stream has its own seed, made from the run's.

    Environments that cannot be saved get other seeds where a run is resumed, lest they begin with the same episodes again."""
    training, algo = config.training, config.parts["algo"].options
    pools, decisions, weights = np.random.SeedSequence(training.seed).spawn(3)
    torch.set_num_threads(1)
    pool = config.make_pool(training.num_envs, pools)
    if at_step and not pool.saveable:
        pool.close()
        pool = config.make_pool(training.num_envs, np.random.SeedSequence([training.seed, at_step]))
    agent = config.make_agent(pool.observation_spec, pool.action_spec, seed=int(weights.generate_state(1)[0]))
    actor = Actor(agent, pool, algo.unroll_length, seed=int(decisions.generate_state(1)[0]))
    assert training.steps is not None
    learner = Learner(agent, config.make_algorithm(), training.steps, training.group_size, training.max_bad_updates)
    return actor, learner


def describe(config: Config) -> str:
    """What the config builds, in a few lines: observation, actions, parts and their parameter counts."""
    pool = config.make_pool(1, 0)
    agent = config.make_agent(pool.observation_spec, pool.action_spec)
    pool.close()
    seen = ", ".join(f"{kind} {s.dtype}{list(s.shape)}" for kind, s in pool.observation_spec.items())
    lines = [
        f"environment  {', '.join(config.envs)}: {seen}; {pool.action_spec.n} actions",
        *(f"{kind:<12} {part.name}" for kind, part in config.parts.items()),
        *(f"  {name:<10} {count_parameters(module):>12,} parameters" for name, module in agent.named_children()),
        f"  {'all':<10} {count_parameters(agent):>12,} parameters",
    ]
    return "\n".join(lines)


def finish(run: Run) -> Run:
    """What the config asked for when training is done: an evaluation, a movie."""
    training = run.config.training
    if training.eval_at_end:
        from bestiary.analysis.evaluate import evaluate

        evaluate(run, episodes=training.eval_at_end).show()
    if training.movie_at_end:
        from bestiary.analysis.movie import film

        note(f"movie: {film(run)}")
    return run
