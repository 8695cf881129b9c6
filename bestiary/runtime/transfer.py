"""Beginning with what another run has learnt: `--init-from RUN`.

The agent is made of the same parts unless others are asked for (`resolve`); torso and memory are taken over as they are. The
policy's outputs go by the names of the actions, those of a critic with a value a task by the names of the tasks: what the other
agent knew is taken over, what it did not begins afresh. So does a critic of another kind, whose numbers would mean something
else. Only the last action, where the agent sees it, goes by its number, whatever that is called here: which weights of a
memory read it, only the memory knows.
"""

import torch
from torch import Tensor

from bestiary.agents.agent import Agent
from bestiary.agents.critics import PopArt, Shared
from bestiary.envs.pool import Pool
from bestiary.errors import UserError
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run


@torch.no_grad()
def take_over(agent: Agent, pool: Pool, source: Run) -> str:
    """Put the newest weights of another run into a fresh agent of this pool's; returns what was taken over, in words."""
    saved, mine = checkpoints.choose(source.path).model(), agent.state_dict()
    theirs = source.config.make_pool(1, 0)
    theirs.close()
    known = {"policy": theirs.action_spec.names, "critic": theirs.tasks}
    wanted = {"policy": pool.action_spec.names, "critic": pool.tasks}
    problems, fresh = list[str](), dict[str, list[str]]()
    critics = [getattr(one, "critic", None) for one in (agent, source.config.make_agent(theirs))]
    same_critic = type(critics[0]) is type(critics[1])
    if isinstance(critics[0], Shared):
        del known["critic"]  # it is blind to the task, so it has learnt nothing that goes by its name
    for name, tensor in mine.items():
        head = name.split(".")[0]
        if head == "critic" and not same_critic:
            fresh[head] = list(wanted[head])
        elif name not in saved:
            problems.append(f"{name}: not in {source.path}")
        elif head in known and len(known[head]) == len(saved[name]) and len(wanted[head]) == len(tensor):
            if saved[name].shape[1:] != tensor.shape[1:]:
                problems.append(_differ(name, saved[name], tensor))
                continue
            for row, key in enumerate(wanted[head]):
                if key in known[head]:
                    tensor[row] = saved[name][known[head].index(key)]
                elif key not in fresh.setdefault(head, []):
                    fresh[head].append(key)
        elif saved[name].shape == tensor.shape:
            tensor.copy_(saved[name])
        else:
            problems.append(_differ(name, saved[name], tensor))
    if problems:
        if len(known["policy"]) != len(wanted["policy"]):
            counts = f"{len(known['policy'])} actions there, {len(wanted['policy'])} here"
            problems.insert(
                0, f"{counts} (agents trained with --full-actions on have the same ones in every Atari game)"
            )
        raise UserError(f"--init-from {source.path}: its agent is another one than this: {problems[0]}")
    agent.load_state_dict(mine)
    if isinstance(critics[0], PopArt):
        critics[0].updates.zero_()  # returns may be of another size here, and only beginners look out for that
    words = [f"{head} begins afresh for {', '.join(keys)}" for head, keys in fresh.items()]
    pairs = zip(known["policy"], wanted["policy"], strict=False)
    renamed = [(there, here) for there, here in pairs if there != here and getattr(agent, "sees_action", False)]
    if renamed:
        there, here = renamed[0]
        words.append(f"the last action that it sees goes by its number: what was {there} there is {here} here")
    return "; ".join([f"weights of {source.path} at step {source.steps}", *words])


def _differ(name: str, saved: Tensor, mine: Tensor) -> str:
    return f"{name}: {list(saved.shape)} there, {list(mine.shape)} here"
