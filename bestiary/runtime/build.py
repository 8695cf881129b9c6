"""From a config to the parts of a run: its environments, its actors, its learner, and how they are laid out."""

import copy
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent
from bestiary.algorithms.algorithm import Algorithm, updates
from bestiary.config import Config, Training
from bestiary.cores import cores
from bestiary.envs.pool import Interface, Pool
from bestiary.runs.folder import open_run
from bestiary.runtime import local
from bestiary.runtime.actor import Actor
from bestiary.runtime.devices import choose_device, placement
from bestiary.runtime.learner import Learner
from bestiary.runtime.probe import usual_group_size
from bestiary.runtime.transfer import take_over

ENOUGH = 2**27  # bytes of random play to get acquainted with


def build(config: Config, at_step: int | None = None) -> tuple[list[Actor], Learner]:
    """The actors and the learner of a new run, or of one that goes on at a step; each random stream has its own seed, made from
    the run's.

    A serial run has one actor, which acts with the learner's own agent; a local one has an actor a pool, with a copy each."""
    training = config.training
    torch.set_num_threads(1)
    acting, learning = placement(training)
    pools = make_pools(config, range(training.all_pools), at_step or 0)
    learner = make_learner(config, pools[0], first_agent(config, pools[0], new=at_step is None), learning)
    copied = training.runtime == "local"
    agents = [copy.deepcopy(learner.agent).to(acting) if copied else learner.agent for _ in pools]
    return make_actors(config, pools, agents, range(len(pools)), acting, at_step or 0), learner


def make_pools(config: Config, which: range, at_step: int = 0, life: int = 0) -> list[Pool]:
    """Some of the pools of a run. Environments that cannot go on where they were get other seeds where a run is resumed, and
    in another `life` of theirs, lest episodes come twice."""
    training = config.training
    root = np.random.SeedSequence(training.seed).spawn(3)[0]

    def make(root: np.random.SeedSequence) -> list[Pool]:
        children = root.spawn(training.all_pools)
        return [config.make_pool(training.pool_size, children[index]) for index in which]

    if life:
        return make(np.random.SeedSequence([training.seed, at_step, life]))
    made = make(root)
    if afresh(config, at_step, made[0]):
        for pool in made:
            pool.close()
        made = make(np.random.SeedSequence([training.seed, at_step]))
    return made


def make_actors(
    config: Config,
    pools: list[Pool],
    agents: list[Agent],
    which: range,
    device: torch.device,
    at_step: int = 0,
    life: int = 0,
) -> list[Actor]:
    """An actor for each of some of the run's pools, with an agent each."""
    training, length = config.training, config.make_algorithm().unroll_length
    children = np.random.SeedSequence(training.seed).spawn(3)[1].spawn(training.all_pools)
    seeds = [int(children[index].generate_state(1)[0]) + at_step + life for index in which]
    made = zip(agents, pools, seeds, strict=True)
    return [Actor(agent, pool, length, seed, device, training.precision) for agent, pool, seed in made]


def first_agent(config: Config, pool: Pool, new: bool = True) -> Agent:
    """The agent that a run in environments like a pool's begins with; where not `new`, what takes a checkpoint's weights."""
    weights = np.random.SeedSequence(config.training.seed).spawn(3)[2]
    agent = config.make_agent(pool, seed=int(weights.generate_state(1)[0]))
    if new and config.training.init_from is not None:
        take_over(agent, pool, open_run(config.training.init_from))
    elif new:
        acquaint(config, agent)
    return agent


def make_learner(config: Config, pool: Pool | Interface, agent: Agent, device: torch.device) -> Learner:
    training = config.training
    assert training.steps is not None
    return Learner(
        agent.to(device),
        config.make_algorithm(),
        training.steps,
        training.group_size or usual_group_size(config, pool),
        training.max_bad_updates,
        device,
        training.precision,
        training.seed,
    )


def acquaint(config: Config, agent: Agent, decisions: int = 100) -> None:
    """Show what random play looks like to the parts that ask for it, before the first weights are copied to anybody."""
    asking: list[Any] = [module for module in agent.modules() if getattr(module, "curious", False)]
    if not asking:
        return
    seed = np.random.SeedSequence([config.training.seed, 1])
    num_envs = max(8, len(config.envs))
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


def afresh(config: Config, at_step: int, pool: Pool) -> bool:
    """Whether environments begin anew where a run is resumed, with other seeds."""
    return bool(at_step) and (config.training.runtime != "serial" or not pool.saveable)


def make_layout(config: Config) -> local.Layout:
    """Who plays and who learns in a local run, and how far ahead."""
    training, algorithm = config.training, config.make_algorithm()
    on_policy = algorithm.on_policy  # then nobody learns while others play: play on all cores
    return local.Layout(
        threads=training.actor_threads or (min(cores(), training.pools) if on_policy else 1),
        workers=training.workers or (cores() if choose_device(training.device).type == "cpu" else 1),
        in_flight=rollouts_in_flight(algorithm, training),
        fixed_lag=0 if on_policy else training.lag,
    )


def rollouts_in_flight(algorithm: Algorithm, training: Training) -> int:
    """How many rollouts may be played or waiting at once, so that no decision is older than --max-lag updates.

    Up to the last update made of it, a rollout's first decision sees the updates of all that is learnt from before it, and of
    what is learnt from at once with it."""
    num_envs, pools = training.pool_size, training.all_pools
    joined, made = algorithm.rollouts(num_envs, pools), updates(algorithm, num_envs, pools)
    if algorithm.on_policy:
        return joined
    assert training.max_lag is not None
    return min((training.max_lag + 1) // made * joined, max(2, joined) + pools)
