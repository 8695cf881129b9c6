"""From a config to a finished run: build the parts, train, and do what was asked for at the end."""

import copy
import os
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent, count_parameters
from bestiary.algorithms.algorithm import Algorithm, updates
from bestiary.algorithms.clipping import complaints, fitting_scale
from bestiary.config import Config, Training, group_key, make_pool
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
from bestiary.runtime.devices import check_device, choose_device, placement
from bestiary.runtime.episodes import return_name
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.learner import Learner
from bestiary.runtime.probe import choose_group_size, usual_group_size
from bestiary.runtime.session import Session, resume_note
from bestiary.runtime.transfer import take_over
from bestiary.runtime.validation import check_validation, make_validator
from bestiary.textconfig import flatten

ENOUGH = 2**27  # bytes of random play to get acquainted with


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
    run, exists = create_run(config, place)
    if exists:
        mine, theirs = config.training, run.config.training
        same = group_key(flatten(run.config.tables()), "steps") == group_key(flatten(config.tables()), "steps")
        if not same or theirs.seed != mine.seed:
            raise UserError(f"{run.path} is a run of another configuration or seed; choose another --name")
        return resume(run, mine.steps if mine.steps != theirs.steps else None)
    with run.writing():
        if run.checkpoints:
            raise UserError(f"{run.path} has been trained in the meantime")
        run.config = config
        settle(run)
        _train(run, run.config, None)
    return finish(run)


def resume(run: Run, steps: int | None = None, checkpoint: int | None = None) -> Run:
    """Go on with a run from its newest checkpoint (or an earlier one), to its total of steps or a new one."""
    check_loggers(run.config)
    check_device(run.config)
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
            return run
        note(f"resuming {run.path} at step {done}")
        _train(run, run.config, chosen)
    return finish(run)


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


def _train(run: Run, config: Config, checkpoint: Checkpoint | None) -> None:
    training = config.training
    actors, learner = build(config, checkpoint.steps if checkpoint else 0)
    if training.record:
        _record(run, config, actors, checkpoint.steps if checkpoint else 0)
    first, past = actors[0], None
    if checkpoint is not None:
        load_weights(learner.agent, checkpoint)
        past = checkpoint.state()
        learner.load({"model": checkpoint.model(), "optimizer": checkpoint.optimizer()}, past)
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
    if session.interrupts.received is not None and learner.steps < session.total:
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


def build(config: Config, at_step: int = 0) -> tuple[list[Actor], Learner]:
    """The actors and the learner of a run, fresh; each random stream has its own seed, made from the run's.

    A serial run has one actor, which acts with the learner's own agent; a local one has an actor a pool, with a copy each.
    Environments that cannot go on where they were get other seeds where a run is resumed, lest episodes come twice."""
    training, algorithm = config.training, config.make_algorithm()
    is_local = training.runtime == "local"
    pools, decisions, weights = np.random.SeedSequence(training.seed).spawn(3)
    count = training.pools if is_local else 1
    torch.set_num_threads(1)
    acting, learning = placement(training)
    made = _make_pools(config, pools.spawn(count))
    if _afresh(config, at_step, made[0]):
        for pool in made:
            pool.close()
        made = _make_pools(config, np.random.SeedSequence([training.seed, at_step]).spawn(count))
    agent = config.make_agent(made[0], seed=int(weights.generate_state(1)[0]))
    if at_step == 0 and training.init_from is not None:
        take_over(agent, made[0], open_run(training.init_from))
    elif at_step == 0:
        acquaint(config, agent)
    agent = agent.to(learning)
    seeds = [int(child.generate_state(1)[0]) for child in decisions.spawn(count)]
    actors = [
        Actor(
            copy.deepcopy(agent).to(acting) if is_local else agent,
            pool,
            algorithm.unroll_length,
            seed + at_step,
            acting,
            training.precision,
        )
        for pool, seed in zip(made, seeds, strict=True)
    ]
    assert training.steps is not None
    learner = Learner(
        agent,
        algorithm,
        training.steps,
        training.group_size or usual_group_size(config, made[0]),
        training.max_bad_updates,
        learning,
        training.precision,
        training.seed,
    )
    return actors, learner


def acquaint(config: Config, agent: Agent, num_envs: int = 8, decisions: int = 100) -> None:
    """Show what random play looks like to the parts that ask for it, before the first weights are copied to anybody."""
    asking: list[Any] = [module for module in agent.modules() if getattr(module, "curious", False)]
    if not asking:
        return
    seed = np.random.SeedSequence([config.training.seed, 1])
    pool, rng, seen = config.make_pool(num_envs, seed), np.random.default_rng(seed), []
    try:
        step = pool.reset()
        size = sum(x.nbytes for x in step.observation.values())
        every = 1 + decisions * size // ENOUGH
        for t in range(decisions):
            pool.send(rng.integers(0, pool.action_spec.n, num_envs))
            step = pool.recv()
            if t % every == 0:
                seen.append({kind: torch.from_numpy(x.copy()) for kind, x in step.observation.items()})
    finally:
        pool.close()
    for module in asking:
        module.acquaint({kind: torch.cat([step[kind] for step in seen]) for kind in seen[0]})


def _make_pools(config: Config, seeds: list[np.random.SeedSequence]) -> list[Pool]:
    return [config.make_pool(config.training.num_envs // len(seeds), seed) for seed in seeds]


def _afresh(config: Config, at_step: int, pool: Pool) -> bool:
    """Whether environments begin anew where a run is resumed, with other seeds."""
    return bool(at_step) and (config.training.runtime == "local" or not pool.saveable)


def _record(run: Run, config: Config, actors: list[Actor], at_step: int) -> None:
    """Have every pool's decisions written down; where environments go on, in the file that they began."""
    afresh = _afresh(config, at_step, actors[0].pool)
    root = np.random.SeedSequence(config.training.seed).spawn(3)[0]
    root = np.random.SeedSequence([config.training.seed, at_step]) if afresh else root
    rows = 0 if afresh else at_step // config.training.num_envs
    for k, (actor, seed) in enumerate(zip(actors, root.spawn(len(actors)), strict=True)):
        path = run.path / "recordings" / f"train-{at_step if afresh else 0:012d}-{k}.json"
        made = (list(config.envs), config.env_options, seed, config.rewards)
        actor.pool = record(actor.pool, path, *made, rows=rows, run=run.name, policy="training")


def make_layout(config: Config) -> local.Layout:
    """Who plays and who learns in a local run, and how far ahead."""
    training, algorithm, cores = config.training, config.make_algorithm(), os.cpu_count() or 1
    on_policy = algorithm.on_policy  # then nobody learns while others play: play on all cores
    return local.Layout(
        threads=training.actor_threads or (min(cores, training.pools) if on_policy else 1),
        workers=training.workers or (cores if choose_device(training.device).type == "cpu" else 1),
        in_flight=rollouts_in_flight(algorithm, training),
        fixed_lag=0 if on_policy else training.lag,
    )


def rollouts_in_flight(algorithm: Algorithm, training: Training) -> int:
    """How many rollouts may be played or waiting at once, so that no decision is older than --max-lag updates.

    Up to the last update made of it, a rollout's first decision sees the updates of all that is learnt from before it, and of
    what is learnt from at once with it."""
    num_envs = training.num_envs // training.pools
    joined, made = algorithm.rollouts(num_envs, training.pools), updates(algorithm, num_envs, training.pools)
    if algorithm.on_policy:
        return joined
    return min((training.max_lag + 1) // made * joined, max(2, joined) + training.pools)


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
        for line in complaints(pool.trained, pool.components, mode, scale):
            fitting = fitting_scale(pool.trained, pool.components)
            warn(
                f"--reward {config.rewards.trained}, times {scale:g} and clipped ({mode}): {line}. "
                f"--algo.reward-scale {fitting:g} or --algo.reward none would keep it apart"
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
    pool, agent = _build_once(config)
    _warn_of_the_clip(config)
    seen = ", ".join(f"{kind} {s.dtype}{list(s.shape)}" for kind, s in pool.observation_spec.items())
    lines = [
        f"environment  {', '.join(config.envs)}: {seen}; {pool.action_spec.n} actions",
        *([] if config.rewards.plain else [reward_lines(config, pool, agent)]),
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
