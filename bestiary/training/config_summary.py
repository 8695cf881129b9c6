"""Text summary of a config: its environment, rewards, components, numbers of parameters, and warm start."""

from functools import partial
from typing import Any

from bestiary.agents.agent import Agent, count_fc_parameters, count_parameters
from bestiary.agents.component_defaults import AgentDefaults
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.config.config import Config, env_slug, make_vector_env, task_interfaces
from bestiary.config.derived_options import learn_sizes
from bestiary.config.reward_clipping_check import clipping_warnings, unclipped_scale
from bestiary.envs.episode_stats import return_name
from bestiary.envs.multitask import describe_observations
from bestiary.envs.rewards.wrapper import parse_rewards
from bestiary.envs.step_checks import check_first_steps
from bestiary.runs.run import open_run
from bestiary.training.validation import check_validation
from bestiary.training.warm_start import check_pretrained_state, load_pretrained
from bestiary.utils.console import note, warn
from bestiary.utils.options import field_types
from bestiary.utils.plugin_names import PluginRef


def describe(config: Config) -> str:
    """Return a summary of the environment, the rewards, the components and their numbers of parameters.

    This function builds the agent with the same functions as training does, so that invalid settings raise the same
    errors.
    """
    check_validation(config)
    check_user_envs(config)
    agent = config.make_agent()
    interface = config.interface
    warn_about_clipping(config)
    note_unequal_sizes(config)
    observations = describe_observations(interface)
    lines = [f"environment  {', '.join(config.envs)}: {observations}; {interface.action_spec.n} actions"]
    if not config.rewards.is_default:
        lines.append(describe_rewards(config, agent))
    if config.training.init_from is not None:
        lines.append(f"{'warm start':<12} {describe_warm_start(config)}")
    lines += [f"{kind:<12} {component.name}" for kind, component in config.components.items()]
    lines += [f"  {name:<10} {count_parameters(module):>12,} parameters" for name, module in agent.named_children()]
    total = f"  {'all':<10} {count_parameters(agent):>12,} parameters"
    fc_parameters = count_fc_parameters(agent)
    if fc_parameters:
        total += f", {fc_parameters:,} of them in the torso's fully connected layers"
    lines.append(total)
    return "\n".join(lines)


def note_unequal_sizes(config: Config) -> None:
    """Print a note if tasks or pools have unequal numbers of environments, or if batches do not fit the rollouts."""
    training = config.training
    algorithm = config.make_algorithm()
    parts = []
    if not training.has_equal_pools:
        parts.append(f"the pools have {' and '.join(map(str, dict.fromkeys(training.pool_sizes)))} environments")
    counts = {name: len(config.envs_of_task(k)) for k, name in enumerate(config.envs)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{env_slug(name)} {count}" for name, count in counts.items())
        parts.append(f"the tasks have unequal numbers of environments ({listed})")
    sizes = learn_sizes(algorithm, training)
    if sizes.max_waiting:
        parts.append(
            f"each rollout has {training.pool_size} trajectories and each batch {sizes.batch_size}, so up to "
            f"{sizes.max_waiting} trajectories wait for the next rollout"
        )
    if parts:
        note(f"note: {'; '.join(parts)}")


def check_user_envs(config: Config) -> None:
    """Reset and step the environments from users' files, so that most errors in them are found before training starts.

    Raises:
        UserError: an environment fails or returns invalid values.
    """
    for name in (name for name in config.envs if isinstance(name, PluginRef)):
        check_first_steps(name, partial(make_vector_env, [name], config.env_options, 2))


def describe_rewards(config: Config, agent: Agent) -> str:
    """Return lines of text about the training reward, the true rewards and the reward that the agent observes."""
    rewards = parse_rewards(config.rewards, task_interfaces(config.envs[:1], config.env_options)[0])
    mode, scale = _reward_transform(config)
    descriptions = {
        "none": "not clipped",
        "abs_one": "clipped to [-1,1]",
        "return_std": "divided by the running standard deviation of the discounted returns",
    }
    clipping = descriptions.get(mode, mode)
    clamps = not isinstance(agent, AgentDefaults) or agent.clamps_last_reward
    observed = {
        True: f"last training reward{', clamped to [-1,1]' if clamps else ''}",
        False: "none",
        None: "last training reward, if the agent uses it",
    }[agent.uses_last_reward if isinstance(agent, AgentDefaults) else None]
    if "extra_inputs" in field_types(type(config.components["agent"].options)):
        observed += " (--agent.extra-inputs)"
    lines = [
        f"{'reward':<12} training: {rewards.training}, times {scale:g}, {clipping}",
        *(f"{'':<12} {return_name(name)}: {reward} (logged only)" for name, reward in rewards.true.items()),
        f"{'':<12} observed by the agent: {observed}",
    ]
    return "\n".join(lines)


def warn_about_clipping(config: Config) -> None:
    """Warn the user if different training rewards become equal after scaling and clipping."""
    if config.rewards.training is None:
        return
    mode, scale = _reward_transform(config)
    for interface in task_interfaces(config.envs, config.env_options):
        rewards = parse_rewards(config.rewards, interface)
        better_scale = unclipped_scale(rewards.training, rewards.components)
        suggestion = "--algo.reward-clipping none"
        if not clipping_warnings(rewards.training, rewards.components, mode, better_scale):
            suggestion = f"--algo.reward-scale {better_scale:g} or {suggestion}"
        for warning in clipping_warnings(rewards.training, rewards.components, mode, scale):
            warn(
                f"--reward {config.rewards.training} (times {scale:g}, clipping {mode}): {warning}; "
                f"to avoid this, use {suggestion}"
            )


def _reward_transform(config: Config) -> tuple[Any, float]:
    """Return the clipping mode and the scale factor of the training reward."""
    options = config.components["algo"].options
    if not isinstance(options, ActorCriticOptions):
        return "none", 1.0
    return options.reward_clipping, options.reward_scale or 1.0


def describe_warm_start(config: Config) -> str:
    """Return a description of the weights that --init-from loads from another run.

    Raises:
        UserError: the weights of that run do not fit the agent.
    """
    assert config.training.init_from is not None
    check_pretrained_state(config)
    return load_pretrained(config.make_agent(), config.interface, open_run(config.training.init_from))
