"""From a config to a finished run: train it, and do what was asked for at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent, count_parameters, fully_connected
from bestiary.algorithms.clipping import complaints, fitting_scale
from bestiary.config import Config, group_key, make_pool
from bestiary.console import note, warn
from bestiary.envs.mixture import MixturePool
from bestiary.envs.pool import Pool
from bestiary.envs.rewards import RewardedPool
from bestiary.errors import UserError
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Place, Run, amend, create_run, load_weights, open_run, unused
from bestiary.runs.loggers import check_loggers
from bestiary.runs.recordings import record
from bestiary.runtime import local, serial
from bestiary.runtime.actor import Actor
from bestiary.runtime.build import afresh, build, first_agent, make_layout, make_learner
from bestiary.runtime.devices import check_device
from bestiary.runtime.episodes import return_name
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.learner import Learner
from bestiary.runtime.probe import choose_group_size
from bestiary.runtime.session import Session, resume_note
from bestiary.runtime.transfer import take_over
from bestiary.runtime.validation import check_validation, make_validator
from bestiary.textconfig import flatten


def start(config: Config, place: Place = Place()) -> Run:
    """Train a new run to its end."""
    check_loggers(config)
    check_validation(config)
    check_device(config)
    pool, agent = _build_once(config)  # what cannot be built is refused before a folder is made
    if not config.rewards.plain:
        note(reward_lines(config, pool, agent))
        _warn_of_the_clip(config)
    if config.training.init_from is not None:
        note(_check_source(config))
    if "critic" in config.parts and config.parts["critic"].name == "popart" and len(config.envs) == 1:
        note("note: PopArt with one task: nothing shares the network with it, but its returns may have any scale")
    with _machines(config) as ray:
        run, exists = create_run(config, place)
        if exists:
            mine, theirs = config.training, run.config.training
            same = group_key(flatten(run.config.tables()), "steps") == group_key(flatten(config.tables()), "steps")
            if not same or theirs.seed != mine.seed:
                raise UserError(f"{run.path} is a run of another configuration or seed; choose another --name")
            further = _resume(run, mine.steps if mine.steps != theirs.steps else None, None, ray)
        else:
            further = True
            with run.writing():
                if run.checkpoints:
                    raise UserError(f"{run.path} has been trained in the meantime")
                run.config = config
                settle(run)
                _train(run, run.config, None, ray)
    return finish(run) if further else run


def resume(run: Run, steps: int | None = None, checkpoint: int | None = None) -> Run:
    """Go on with a run from its newest checkpoint (or an earlier one), to its total of steps or a new one."""
    check_loggers(run.config)
    check_device(run.config)
    with _machines(run.config) as ray:
        further = _resume(run, steps, checkpoint, ray)
    return finish(run) if further else run


@contextmanager
def _machines(config: Config) -> Iterator[Any]:
    """Ray, where the run is to be on a cluster; refused before any work where that has no room for it."""
    training = config.training
    if training.cluster is None:
        yield None
        return
    from bestiary.runtime.ray import connected
    from bestiary.runtime.room import check_machines

    with connected(training.cluster, training.trust_open_cluster) as ray:
        check_machines(ray, config)
        yield ray


def _resume(run: Run, steps: int | None, checkpoint: int | None, ray: Any) -> bool:
    """Returns False where there was nothing left to do."""
    with run.writing():
        for name in checkpoints.remove_unfinished(run.path / "checkpoints"):
            note(f"note: removed {name}, a save that was cut off")
        chosen = _chosen(run, checkpoint)
        done = chosen.steps if chosen else 0
        total = run.config.training.steps
        if steps is not None and steps <= done:
            raise UserError(f"--steps {steps}: {run.path} has done {done} steps already; give a larger total")
        if steps is not None and steps != total:
            amend(run, steps=steps)
            note(f"total steps {total} -> {steps}; the learning-rate schedule is stretched to the new total")
        elif total is not None and done >= total:
            note(f"{run.path} is finished: {done} of {total} steps; bestiary resume {run.path} --steps N goes further")
            return False
        note(f"resuming {run.path} at step {done}")
        _train(run, run.config, chosen, ray)
    return True


def _chosen(run: Run, steps: int | None) -> Checkpoint | None:
    """The checkpoint to go on from; what came after it in the tables and the ladder is not part of the run any more."""
    if not run.checkpoints and steps is None:
        note(f"{run.path} has no checkpoint yet: it begins at the beginning")
        return None
    chosen = checkpoints.choose(run.path, steps)
    for later in run.checkpoints:
        if later.steps > chosen.steps:
            aside = unused(later.path.with_name(f"abandoned-{later.path.name}"))
            later.path.rename(aside)
            note(f"note: {later.path.name} is set aside as {aside.name}")
    return chosen


def _train(run: Run, config: Config, checkpoint: Checkpoint | None, ray: Any) -> None:
    training = config.training
    if ray is not None:
        return _train_on_cluster(run, config, checkpoint, ray)
    actors, learner = build(config, checkpoint.steps if checkpoint else None)
    if training.record:
        _record(run, config, actors, checkpoint.steps if checkpoint else 0)
    first, past = actors[0], _load(learner, checkpoint)
    try:
        if training.runtime == "serial":
            _open(first, checkpoint, learner)
            with Session(run, config, learner, first.pool, first.save, past, make_validator(config)) as session:
                serial.train(first, learner, session)
        else:
            with Session(run, config, learner, first.pool, dict, past, make_validator(config)) as session:
                local.train(actors, learner, session, make_layout(config))
    finally:
        for actor in actors:
            actor.pool.close()
    _leave(run, session)


def _train_on_cluster(run: Run, config: Config, checkpoint: Checkpoint | None, ray: Any) -> None:
    """What `_train` does, with the learning elsewhere; where that is lost, once more from the newest checkpoint."""
    from bestiary.runtime.bundle import Bundle
    from bestiary.runtime.cluster import train
    from bestiary.runtime.restarts import LearnersLost, Restarts

    restarts = Restarts(config.training.max_restarts, _restarts_before(checkpoint))
    while True:
        at_step = checkpoint.steps if checkpoint else 0
        pool = config.make_pool(1, 0)
        pool.close()
        learner = make_learner(config, pool, first_agent(config, pool, new=checkpoint is None), torch.device("cpu"))
        past = _load(learner, checkpoint)
        try:
            with Session(run, config, learner, pool, dict, past, make_validator(config)) as session:
                train(ray, Bundle.of(config, pool), learner, session, restarts, at_step)
            return _leave(run, session)
        except LearnersLost as lost:
            if session.interrupts.received is not None:
                return _leave(run, session)
            checkpoint = checkpoints.newest_good(run.path / "checkpoints")
            restarts.add(f"{lost}: going on from step {checkpoint.steps if checkpoint else 0}, the newest checkpoint")


def _restarts_before(checkpoint: Checkpoint | None) -> int:
    return checkpoint.state().get("counts", {}).get("restarts", 0) if checkpoint else 0


def _load(learner: Learner, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Put a checkpoint into a learner; returns its state.json."""
    if checkpoint is None:
        return None
    load_weights(learner.agent, checkpoint)
    past = checkpoint.state()
    learner.load({"model": checkpoint.model(), "optimizer": checkpoint.optimizer()}, past)
    return past


def _leave(run: Run, session: Session) -> None:
    """Tell the caller where a session was stopped by a signal."""
    if session.interrupts.received is not None and session.learner.steps < session.total:
        resume_note(run)
        raise Interrupted(session.interrupts.received)


def _open(actor: Actor, checkpoint: Checkpoint | None, learner: Learner) -> None:
    """Start a serial actor, or put it where the checkpoint left it."""
    if checkpoint is None:
        return actor.start()
    if not actor.pool.saveable:
        note("note: these environments cannot be saved, so they start new episodes; the resumed run is not bit for bit")
    actor.version = learner.version
    actor.load(checkpoint.actor(), learner.steps)


def _record(run: Run, config: Config, actors: list[Actor], at_step: int) -> None:
    """Have every pool's decisions written down; where environments go on, in the file that they began."""
    anew = afresh(config, at_step, actors[0].pool)
    root = np.random.SeedSequence(config.training.seed).spawn(3)[0]
    root = np.random.SeedSequence([config.training.seed, at_step]) if anew else root
    rows = 0 if anew else at_step // config.training.num_envs
    for k, (actor, seed) in enumerate(zip(actors, root.spawn(len(actors)), strict=True)):
        path = run.path / "recordings" / f"train-{at_step if anew else 0:012d}-{k}.json"
        made = (list(config.envs), config.env_options, seed, config.rewards)
        actor.pool = record(actor.pool, path, *made, rows=rows, run=run.name, policy="training")


def settle(run: Run) -> None:
    """Fill in what was left to the machine, and write it into the run's config."""
    pool = run.config.make_pool(1, 0)
    try:
        amend(run, group_size=choose_group_size(run.config, pool))
    finally:
        pool.close()


def _warn_of_the_clip(config: Config) -> None:
    """What of the trained reward nobody could learn."""
    if config.rewards.trained is None:
        return
    options = config.parts["algo"].options
    mode, scale = getattr(options, "reward", "none"), getattr(options, "reward_scale", None) or 1.0
    for name in config.envs:
        pool = make_pool([name], config.env_options, 1, 0, rewards=config.rewards)
        pool.close()
        assert isinstance(pool, RewardedPool)
        fitting = fitting_scale(pool.trained, pool.components)
        fits = not complaints(pool.trained, pool.components, mode, fitting)
        better = f"--algo.reward-scale {fitting:g} or --algo.reward none" if fits else "--algo.reward none"
        for line in complaints(pool.trained, pool.components, mode, scale):
            warn(
                f"--reward {config.rewards.trained}, times {scale:g} and clipped ({mode}): {line}. "
                f"{better} would keep it apart"
            )


def reward_lines(config: Config, pool: Pool, agent: Agent) -> str:
    """What is trained on, what is only watched, and what the agent sees of it."""
    options = config.parts["algo"].options
    pool = pool.pools[0] if isinstance(pool, MixturePool) else pool
    assert isinstance(pool, RewardedPool)
    mode, scale = getattr(options, "reward", "none"), getattr(options, "reward_scale", None) or 1.0
    clip = {"none": "not clipped", "abs_one": "clipped to [-1,1]"}.get(mode, mode)
    sees = {True: "the last trained one, clamped to [-1,1]", False: "none", None: "the last trained one, if it looks"}
    seen, choosable = sees[getattr(agent, "sees_reward", None)], hasattr(config.parts["agent"].options, "inputs")
    lines = [
        f"{'reward':<12} trained on {pool.trained}, times {scale:g}, {clip}",
        *(f"{'':<12} watched as {return_name(name)}: {reward}" for name, reward in pool.true.items()),
        f"{'':<12} seen by the agent: {seen}{' (--agent.inputs)' * choosable}",
    ]
    return "\n".join(lines)


def _check_source(config: Config) -> str:
    """What will be taken over from another run; refuses one whose agent does not fit."""
    assert config.training.init_from is not None
    pool = config.make_pool(1, 0)
    pool.close()
    return take_over(config.make_agent(pool), pool, open_run(config.training.init_from))


def _build_once(config: Config) -> tuple[Pool, Agent]:
    pool = config.make_pool(1, 0)
    try:
        return pool, config.make_agent(pool)
    finally:
        pool.close()


def describe(config: Config) -> str:
    """What the config builds, in a few lines: observation, actions, parts and their parameter counts. Warns as `start` does."""
    check_validation(config)
    pool, agent = _build_once(config)
    _warn_of_the_clip(config)
    source = [f"{'begins with':<12} {_check_source(config)}"] if config.training.init_from is not None else []
    seen = ", ".join(f"{kind} {s.dtype}{list(s.shape)}" for kind, s in pool.observation_spec.items())
    lines = [
        f"environment  {', '.join(config.envs)}: {seen}; {pool.action_spec.n} actions",
        *([] if config.rewards.plain else [reward_lines(config, pool, agent)]),
        *source,
        *(f"{kind:<12} {part.name}" for kind, part in config.parts.items()),
        *(f"  {name:<10} {count_parameters(module):>12,} parameters" for name, module in agent.named_children()),
        f"  {'all':<10} {count_parameters(agent):>12,} parameters"
        + (
            f", {connected:,} of them in the torso's fully connected layers"
            if (connected := fully_connected(agent))
            else ""
        ),
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
