"""Export the rollouts of a trained agent as NumPy arrays, for example for anomaly detection or other statistics.

The result is one .npz file without pickled objects. Read it with `numpy.load(path)`. All arrays except `protocol` are
[T,N,...]: T steps of N environments. In entry t, the agent observes `observation`, takes `action` and gets `reward`.

    observation.KIND                              observation of the agent at step t; KIND: image or vector
    done                                          whether `observation` is the first one of an episode
    action, log_prob, value, logits               action of the agent and outputs of its network; logits are [T,N,A]
    reward, truncated, game_over, measure.NAME    values that the environment returns after the action of step t
    protocol                                      how the rollouts were collected, as JSON text
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary import __version__
from bestiary.agents.policy_runner import run_policy
from bestiary.config.config import make_vector_env
from bestiary.envs.rewards.wrapper import RewardConfig
from bestiary.evaluation.media import check_output
from bestiary.runs import checkpoints
from bestiary.runs.run import Run
from bestiary.utils.console import note


def export_rollouts(
    run: Run,
    *,
    out: str | Path | None = None,
    rollouts: int = 20,
    length: int = 500,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    env: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Play `length` steps in each of `rollouts` environments, write all arrays to a file, and return its path.

    All reward components of the environment are exported as measures, including those that are not part of the
    training reward. `env` names one of the run's tasks; the default is the first task. If `out` is None, the file is
    written into the run folder.
    """
    config = run.config
    task = config.task_index(env)
    chosen = checkpoints.choose(run.path, checkpoint)
    policy = "greedy" if greedy else "sampled"
    if out is not None:
        path = check_output(out, overwrite, (".npz",), "rollouts")
    else:
        path = run.new_output_path("rollouts", f"{chosen.steps:012d}-{policy}", ".npz")
    agent = run.agent(chosen)
    streams = np.random.SeedSequence([config.training.seed, 4, seed]).spawn(2)
    rewards = RewardConfig(config.rewards.training, config.rewards.true or "reward=1")
    pool = make_vector_env([config.envs[task]], config.env_options, rollouts, streams[0], rewards=rewards)
    measures = list(pool.measures_spec)
    columns: dict[str, list[np.ndarray]] = {}
    action_seed = int(streams[1].generate_state(1)[0])
    try:
        for t, (record, actions) in enumerate(run_policy(agent, pool, greedy=greedy, seed=action_seed, task=task)):
            step = record.step
            output = record.output
            entry: dict[str, np.ndarray] = {}
            if t > 0:
                entry = {"reward": step.reward, "truncated": step.truncated, "game_over": step.game_over}
                entry |= {f"measure.{name}": step.measures[name] for name in measures}
            if t < length:
                entry |= {f"observation.{kind}": array for kind, array in step.observation.items()}
                entry |= {
                    "done": step.done,
                    "action": actions,
                    "log_prob": output.distribution.log_prob(torch.from_numpy(actions)[None])[0].numpy(),
                    "value": output.value[0].numpy(),
                    "logits": output.distribution.logits[0].numpy(),
                }
            for name, array in entry.items():
                columns.setdefault(name, []).append(array.copy())
            if t == length:
                break
    finally:
        pool.close()
    protocol: dict[str, Any] = {
        "run": run.name,
        "environment": config.envs[task],
        "environment_options": config.tables()["env"],
        "rewards": asdict(rewards),
        "action_names": list(pool.action_spec.names),
        "checkpoint_steps": chosen.steps,
        "policy": policy,
        "seed": seed,
        "training_seed": config.training.seed,
        "bestiary": __version__,
    }
    arrays: dict[str, Any] = {name: np.stack(column) for name, column in columns.items()}
    np.savez_compressed(path, protocol=np.array(json.dumps(protocol)), **arrays)
    note(f"the file has {rollouts} rollouts of {length} steps with the arrays {', '.join(arrays)}")
    return path
