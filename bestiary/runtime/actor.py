"""The actor: plays one pool with an agent and writes down what it saw and did as rollouts.

`act` decides on the newest entry and sends the actions; `receive` takes what they led to and returns a Rollout whenever T
decisions are complete. `serial` calls the two in turn; a runtime with threads calls them on several actors in turn, so that
one pool steps while the agent thinks about another.
"""

import numpy as np
import torch
from torch import Tensor

from bestiary import plugins
from bestiary.agents.agent import Agent, Output
from bestiary.envs.pool import Pool, check_finite
from bestiary.errors import RunError
from bestiary.rollout import Arrays, Inputs, Rollout, Step
from bestiary.runtime.devices import autocast
from bestiary.runtime.episodes import EpisodeCounter

CPU = torch.device("cpu")


class Actor:
    def __init__(
        self,
        agent: Agent,
        pool: Pool,
        unroll_length: int,
        seed: int,
        device: torch.device = CPU,
        precision: str = "float32",
    ):
        self.agent, self.pool, self.unroll_length = agent, pool, unroll_length
        self.device, self.precision = device, precision
        self.generator = torch.Generator(device).manual_seed(seed)
        self.counter = EpisodeCounter(pool.num_envs, pool.tasks, pool.measures_spec)
        self.version = 0  # of the weights that agent has now
        self.steps = 0  # decisions made so far, all environments together
        self.state: tuple[Tensor, ...] = agent.initial_state(pool.num_envs)
        self.actions = np.zeros(pool.num_envs, np.int64)  # the last ones
        self.newest: Step | None = None

    def start(self) -> None:
        """Open the pool. After this or `load`, act and receive go on forever."""
        self._begin_rollout(self.pool.reset())

    def collect(self) -> Rollout:
        """Play until a rollout is complete."""
        while True:
            self.act()
            rollout = self.receive()
            if rollout is not None:
                return rollout

    @torch.no_grad()
    def act(self) -> None:
        assert self.newest is not None, "call start or load first"
        output, self.state = self._think(Inputs.of(self.newest, self.actions), self.state)
        if not (output.distribution.is_finite() and bool(torch.isfinite(output.value).all())):
            raise RunError(f"the agent's decisions after step {self.steps} are not finite. Try a smaller --lr")
        action = output.distribution.sample(self.generator)  # [1,N]
        self.rollout.log_prob[self.t] = output.distribution.log_prob(action)[0]
        self.rollout.value[self.t] = output.value[0]
        self.rollout.version[self.t] = self.version
        self.actions = action[0].cpu().numpy()
        self.pool.send(self.actions)

    def receive(self) -> Rollout | None:
        try:
            step = self.pool.recv()
        except RunError as error:
            raise RunError(f"{error} (after step {self.steps} of the run)") from error
        except Exception as error:
            cause = plugins.blame(error) or f"{type(error).__name__}: {error}"
            raise RunError(f"the environment failed after step {self.steps} of the run: {cause}") from error
        self.steps += self.pool.num_envs
        if (problem := check_finite(step, self.pool.tasks)) is not None:
            raise RunError(f"{problem} (at step {self.steps} of the run)")
        if step.truncated.any():
            self._bootstrap(step)  # of the decision at t
        self.t += 1
        self.rollout.episodes += self.counter.add(step, self.t * self.pool.num_envs)
        self.rollout.set_entry(self.t, step, self.actions)
        self.newest = step
        if self.t < self.unroll_length:
            return None
        complete = self.rollout
        self._begin_rollout(step)
        return complete

    @torch.no_grad()
    def _bootstrap(self, step: Step) -> None:
        """The value of what the truncated rows ended on: their episode had not, as far as the agent is concerned."""
        rows = torch.from_numpy(np.flatnonzero(step.truncated))
        inputs = Inputs(
            {kind: torch.from_numpy(array)[None] for kind, array in step.final.items()},
            torch.from_numpy(step.reward)[rows][None],
            torch.zeros(1, len(rows), dtype=torch.bool),
            torch.from_numpy(self.actions)[rows][None],
            torch.from_numpy(step.task)[rows][None],
        )
        output, _ = self._think(inputs, tuple(s[rows.to(self.device)] for s in self.state))
        self.rollout.bootstrap[self.t, rows] = output.value[0].cpu()

    def _think(self, inputs: Inputs, state: tuple[Tensor, ...]) -> tuple[Output, tuple[Tensor, ...]]:
        with autocast(self.device, self.precision):
            return self.agent(inputs.to(self.device), state)

    def _begin_rollout(self, step: Step) -> None:
        """A new rollout whose first entry is the last one of the rollout before."""
        pool = self.pool
        state = tuple(s.clone() for s in self.state)
        specs = pool.observation_spec, pool.measures_spec
        pinned = self.device.type == "cuda"
        self.rollout = Rollout.empty(self.unroll_length, pool.num_envs, *specs, state, pinned)
        self.rollout.set_entry(0, step, self.actions)
        self.newest, self.t = step, 0

    def save(self) -> Arrays:
        """All of the actor and its pool as arrays, between two rollouts."""
        assert self.newest is not None
        assert self.t == 0, "an actor is saved between rollouts"
        step = self.newest
        newest = {"reward": step.reward, "done": step.done, "truncated": step.truncated, "task": step.task}
        arrays = {
            "generator": self.generator.get_state().numpy(),
            "actions": self.actions,
            **{f"memory.{i}": s.cpu().numpy() for i, s in enumerate(self.state)},
            **{f"count.{name}": array for name, array in self.counter.sums.items()},
            **{f"newest.{name}": array for name, array in newest.items()},
            **{f"observation.{kind}": array for kind, array in step.observation.items()},
            **{f"measures.{name}": array for name, array in step.measures.items()},
            **{f"pool.{name}": array for name, array in self.pool.save().items()},
        }
        return {name: np.array(array, order="C") for name, array in arrays.items()}  # copies: the run goes on

    def load(self, arrays: Arrays, steps: int) -> None:
        """Go on from a saved state. A pool that cannot be saved starts new episodes, and with them a new memory."""
        self.steps = steps
        self.generator.set_state(torch.from_numpy(arrays["generator"]))
        if not self.pool.saveable:
            return self.start()

        def below(prefix: str) -> Arrays:
            return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

        self.pool.load(below("pool."))
        self.state = tuple(torch.from_numpy(arrays[f"memory.{i}"]).to(self.device) for i in range(len(self.state)))
        self.actions = arrays["actions"]
        self.counter.sums |= {name: array.copy() for name, array in below("count.").items()}
        reward, done, truncated, task = (arrays[f"newest.{name}"] for name in ("reward", "done", "truncated", "task"))
        self._begin_rollout(Step(below("observation."), reward, done, truncated, done, task, below("measures.")))
