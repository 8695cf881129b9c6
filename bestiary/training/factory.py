"""Functions that build the vector environments, agent, actors, learner and threads of a run from its config."""

import copy
from typing import Any

import numpy as np
import torch

from bestiary.agents.agent import Agent
from bestiary.agents.component_defaults import TorsoDefaults
from bestiary.algorithms.base import Algorithm
from bestiary.config.config import Config
from bestiary.config.derived_options import learn_sizes
from bestiary.config.training_options import Training
from bestiary.envs.vector_env import VectorEnv
from bestiary.runs.run import open_run
from bestiary.training import local
from bestiary.training.actor import Actor
from bestiary.training.devices import choose_device, choose_devices
from bestiary.training.learner import Learner
from bestiary.training.micro_batch_tuning import default_micro_batch_size
from bestiary.training.warm_start import load_pretrained, load_pretrained_state
from bestiary.utils.cpu import num_cores

MAX_CALIBRATION_BYTES = 2**27  # maximum total size of the observations that `calibrate_agent` keeps, in bytes


def make_actors_and_learner(config: Config, start_step: int | None = None) -> tuple[list[Actor], Learner]:
    """Return the actors and the learner of a run. If the run is resumed, `start_step` is the step of its checkpoint.

    A serial run has one actor, which uses the learner's agent. A local run has one actor per vector environment, and
    each actor has its own copy of the agent. Environments, action sampling and initial weights have different seeds,
    which are derived from the seed of the run.
    """
    training = config.training
    torch.set_num_threads(1)
    actor_device, learner_device = choose_devices(training)
    pools = make_vector_envs(config, range(training.total_pools), start_step or 0)
    agent = make_initial_agent(config, new=start_step is None)
    learner = make_learner(config, agent, learner_device)
    if start_step is None:
        load_pretrained_state(config, learner.algorithm)
    if training.runtime == "local":
        agents = [copy.deepcopy(learner.agent).to(actor_device) for _ in pools]
    else:
        agents = [learner.agent for _ in pools]
    return make_actors(config, pools, agents, range(len(pools)), actor_device, start_step or 0), learner


def make_vector_envs(config: Config, indices: range, start_step: int = 0, incarnation: int = 0) -> list[VectorEnv]:
    """Return the vector environments that have the given indices in the run.

    Environments get new seeds if their previous state is lost, so that they do not repeat their first episodes. The
    state is lost in two cases: the run is resumed at `start_step` and cannot restore the state, or the environments
    were created again after a failure (`incarnation` > 0).
    """

    def make(seeds: list[np.random.SeedSequence]) -> list[VectorEnv]:
        rows = {index: config.training.envs_of_pool(index) for index in indices}
        return [config.make_vector_env(len(rows[k]), seeds[k], first_env=rows[k].start) for k in indices]

    if incarnation:
        return make(env_seeds(config, start_step, incarnation))
    pools = make(env_seeds(config))
    if restarts_environments(config, start_step, pools[0]):
        for pool in pools:
            pool.close()
        pools = make(env_seeds(config, start_step))
    return pools


def env_seeds(config: Config, restart_step: int = 0, incarnation: int = 0) -> list[np.random.SeedSequence]:
    """Return the seeds of all vector environments of a run.

    Args:
        config: config of the run.
        restart_step: step at which the run was last resumed with new environments, or 0 if there is no such step.
        incarnation: 0, or a number that is different each time the environments are created again after a failure.
    """
    seed = config.training.seed
    if incarnation:
        root = np.random.SeedSequence([seed, restart_step, incarnation])
    elif restart_step:
        root = np.random.SeedSequence([seed, restart_step])
    else:
        root = np.random.SeedSequence(seed).spawn(3)[0]
    return root.spawn(config.training.total_pools)


def restarts_environments(config: Config, start_step: int, pool: VectorEnv) -> bool:
    """Return whether a run that is resumed at `start_step` creates new environments instead of restoring their state.

    Return False if `start_step` is 0.
    """
    return bool(start_step) and (config.training.runtime != "serial" or not pool.saveable)


def make_actors(
    config: Config,
    pools: list[VectorEnv],
    agents: list[Agent],
    indices: range,
    device: torch.device,
    start_step: int = 0,
    incarnation: int = 0,
) -> list[Actor]:
    """Return one actor for each pair (pools[k], agents[k]).

    Args:
        config: config of the run.
        pools: vector environments.
        agents: one agent for each vector environment.
        indices: index of each element of `pools` among all vector environments of the run. The seeds for action
            sampling depend on these indices.
        device: device of the agents.
        start_step: step at which the run is started or resumed. The seeds for action sampling depend on this step.
        incarnation: 0, or a number that is different each time the actors are created again after a failure.
    """
    training = config.training
    algorithm = config.make_algorithm()
    children = np.random.SeedSequence(training.seed).spawn(3)[1].spawn(training.total_pools)
    seeds = [int(children[index].generate_state(1)[0]) + start_step + incarnation for index in indices]
    return [
        Actor(
            agent,
            pool,
            algorithm.sequence_length,
            seed,
            device,
            training.precision,
            first_env=training.envs_of_pool(index).start,
            return_discount=algorithm.return_discount,
        )
        for agent, pool, seed, index in zip(agents, pools, seeds, indices, strict=True)
    ]


def make_untrained_agent(config: Config) -> Agent:
    """Return an agent with random initial weights, which depend on the seed of the run."""
    weights_seed = np.random.SeedSequence(config.training.seed).spawn(3)[2]
    return config.make_agent(seed=int(weights_seed.generate_state(1)[0]))


def make_initial_agent(config: Config, new: bool = True) -> Agent:
    """Return an agent with initial weights.

    If `new` is true, these are the weights of the run given by `--init-from`. Without `--init-from`, the weights are
    random, and the agent is calibrated (see `calibrate_agent`). If `new` is false, the caller must load the weights of
    a checkpoint into the agent.
    """
    agent = make_untrained_agent(config)
    if new and config.training.init_from is not None:
        load_pretrained(agent, config.interface, open_run(config.training.init_from))
    elif new:
        calibrate_agent(config, agent)
    return agent


def make_learner(config: Config, agent: Agent, device: torch.device, num_learners: int = 1) -> Learner:
    """Move the agent to `device` and return a learner for it. Each batch is split among `num_learners` learners."""
    training = config.training
    assert training.steps is not None
    algorithm = config.make_algorithm()
    part = algorithm.shard(num_learners) if num_learners > 1 else algorithm
    assert part is not None, "resolve has checked that the algorithm can be sharded"
    batch_size = None
    if not part.on_policy:
        batch_size = part.batch_size(training.pool_size // num_learners, training.total_pools)
    return Learner(
        agent.to(device),
        part,
        training.steps,
        training.micro_batch_size or default_micro_batch_size(config),
        training.max_skipped_updates,
        device,
        training.precision,
        training.seed,
        len(config.envs),
        batch_size,
    )


def calibrate_agent(config: Config, agent: Agent, num_steps: int = 100) -> None:
    """Call the method `calibrate` of each torso that has `needs_calibration`, with observations of random actions.

    If no torso needs calibration, do nothing. Call this function before the weights are copied to the actors.
    """
    torsos: list[Any] = [module for module in agent.modules() if isinstance(module, TorsoDefaults)]
    modules = [torso for torso in torsos if torso.needs_calibration]
    if not modules:
        return
    seed = np.random.SeedSequence([config.training.seed, 1])
    rng = np.random.default_rng(seed)
    num_envs = max(8, len(config.envs))
    pool = config.make_vector_env(num_envs, seed)
    observations = []
    try:
        step = pool.reset()
        bytes_per_step = sum(array.nbytes for array in step.observation.values())
        stride = 1 + num_steps * bytes_per_step // MAX_CALIBRATION_BYTES
        for t in range(num_steps):
            pool.send(rng.integers(0, pool.action_spec.n, num_envs))
            step = pool.recv()
            if t % stride == 0:
                observations.append({kind: torch.from_numpy(x.copy()) for kind, x in step.observation.items()})
    finally:
        pool.close()
    for module in modules:
        module.calibrate({kind: torch.cat([o[kind] for o in observations]) for kind in observations[0]})


def make_thread_layout(config: Config) -> local.ThreadLayout:
    """Return the numbers of actor and learner threads of a local run, and its limits on the policy lag."""
    training = config.training
    algorithm = config.make_algorithm()
    # With an on-policy algorithm, actors use all cores, because the learner is idle while they collect rollouts.
    default_actor_threads = min(num_cores(), training.pools) if algorithm.on_policy else 1
    default_learner_threads = num_cores() if choose_device(training.device).type == "cpu" else 1
    return local.ThreadLayout(
        actor_threads=training.actor_threads or default_actor_threads,
        learner_threads=training.learner_threads or default_learner_threads,
        max_in_flight=max_rollouts_in_flight(algorithm, training),
        fixed_lag=0 if algorithm.on_policy else training.lag,
    )


def max_rollouts_in_flight(algorithm: Algorithm, training: Training) -> int:
    """Return the maximum number of rollouts in flight: rollouts that are being collected or wait for the learner.

    Let R be the number of rollouts per learn call. For an on-policy algorithm, the maximum is R. For other algorithms,
    it is the smaller of two limits:

    (1) The largest multiple M of R for which the policy lag is at most --max-lag. If at most M rollouts are in flight,
    a rollout is received by one of the first M / R learn calls after its start.

    (2) The number of vector environments + max(2, R). More rollouts in flight would increase the lag but not the speed.
    """
    sizes = learn_sizes(algorithm, training)
    if algorithm.on_policy:
        return sizes.rollouts
    assert training.max_lag is not None
    useful = max(2, sizes.rollouts) + training.total_pools
    return min(sizes.max_calls(training.max_lag, limit=-(-useful // sizes.rollouts)) * sizes.rollouts, useful)
