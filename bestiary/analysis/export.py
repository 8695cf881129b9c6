"""Rollouts of a trained agent as plain arrays, for detectors and statistics of one's own.

One .npz file, without pickles: `numpy.load(path)` is all that is needed. Every array has [T,N] in front, T steps of N
environments side by side; entry t is the state that the decision at t was made in.

    observation.KIND    what the agent saw
    action, log_prob, value, logits     what it did there; logits [T,N,A] of all actions
    done                the entry opens an episode
    reward, truncated, game_over, measure.NAME      what the decision at t brought: entry t+1 of the pool, moved to t
    protocol            how it was made, as JSON text
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary import __version__
from bestiary.analysis.play import moments
from bestiary.analysis.stage import which_task
from bestiary.config import make_pool
from bestiary.console import note
from bestiary.envs.rewards import Rewards
from bestiary.errors import UserError
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run


def export(
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
    """Play `rollouts` environments for `length` steps and write down everything about them; returns the file.

    Every component of the environment's reward is measured, whatever the run was trained on. `env` is one of the run's tasks,
    else the first."""
    config, task = run.config, which_task(run, env)
    chosen = checkpoints.choose(run.path, checkpoint)
    path = Path(out).expanduser() if out is not None else None
    if path is not None and (path.suffix != ".npz" or not path.resolve().parent.is_dir()):
        raise UserError(f"--out {out}: expected a new .npz file in a folder that exists")
    if path is not None and path.exists() and not overwrite:
        raise UserError(f"--out {out} exists; choose another name or add --overwrite")
    path = path or run.new_path("rollouts", f"{chosen.steps:012d}-{'greedy' if greedy else 'sampled'}", ".npz")
    agent = run.agent(chosen)
    streams = np.random.SeedSequence([config.training.seed, 4, seed]).spawn(2)
    rewards = Rewards(config.rewards.trained, config.rewards.true or "reward=1")
    pool = make_pool([config.envs[task]], config.env_options, rollouts, streams[0], rewards=rewards)
    names, columns = list(pool.measures_spec), dict[str, list[np.ndarray]]()
    draws = int(streams[1].generate_state(1)[0])
    try:
        for t, (moment, actions) in enumerate(moments(agent, pool, greedy=greedy, seed=draws, task=task)):
            step, output = moment.step, moment.output
            entry: dict[str, np.ndarray] = {}
            if t > 0:
                entry = {"reward": step.reward, "truncated": step.truncated, "game_over": step.game_over}
                entry |= {f"measure.{name}": step.measures[name] for name in names}
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
        "actions": list(pool.action_spec.names),
        "checkpoint_steps": chosen.steps,
        "policy": "greedy" if greedy else "sampled",
        "seed": seed,
        "training_seed": config.training.seed,
        "bestiary": __version__,
    }
    arrays: dict[str, Any] = {name: np.stack(column) for name, column in columns.items()}
    np.savez_compressed(path, protocol=np.array(json.dumps(protocol)), **arrays)
    note(f"{rollouts} rollouts of {length} steps: {', '.join(arrays)}")
    return path
