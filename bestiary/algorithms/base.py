"""The base class of algorithms.

Actors collect rollouts of `sequence_length` steps. The learner passes `rollouts_per_learn(...)` rollouts to the
generator `batches`, which yields batches. The learner splits each batch into micro-batches, sums the gradients of their
losses, and makes one optimizer step. It sends the metrics of this update back to the generator:

    actors -> [Rollout, ...] -> algorithm.batches -> Batch -> sum of gradients -> optimizer step
                                      ^                                                |
                                      +------------------- metrics --------------------+
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.agents.run_context import RunContext
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.algorithms.optimizers import RMSprop, RMSpropTF, make_adam
from bestiary.algorithms.return_statistics import NORMALISED_REWARD
from bestiary.rollout import Inputs, Rollout, Tensors, concatenate
from bestiary.utils.errors import RunError
from bestiary.utils.options import option

Metrics = dict[str, float]
MAIN_OPTIMIZER = "main"  # name of the optimizer of algorithms that have only one


@dataclass
class Loss:
    """The loss of a batch."""

    total: Tensor  # the loss, summed over all steps of the batch
    sums: dict[str, Tensor]  # metrics for metrics.csv by name; each is a sum over all steps of the batch
    targets: Tensor | None = None  # value targets [T,B], for critics that normalise (PopArt)


LossFunction = Callable[[Agent, Rollout, float], Loss]  # (agent, micro-batch, progress of the run from 0 to 1) -> Loss


@dataclass(frozen=True)
class Batch:
    """The trajectories of one update, and the loss and the optimizer of this update."""

    rollout: Rollout  # trajectories [T,B]
    loss: LossFunction  # the loss function that the update minimises; usually `Algorithm.loss`
    optimizer: str = MAIN_OPTIMIZER  # key in the result of `Algorithm.make_optimizers`
    num_new: int | None = None  # the first `num_new` trajectories are new, the others are replayed; None: all are new


Batches = Generator[Batch, Metrics, None]


@dataclass(frozen=True)
class LearnContext:
    """Functions and objects of the learner that `Algorithm.batches` can use."""

    infer: Callable[[Inputs, State], tuple[Output, State]]  # calls the agent without gradients
    generator: torch.Generator  # random generator, seeded with the seed and the current step of the run
    all_reduce: Callable[[Tensor], Tensor]  # returns the sum of a tensor over all learners


class Algorithm:
    """Base class of algorithms. A subclass must define `loss`; all other methods have defaults.

    By default, batches are formed from the rollouts in the order of collection, and each trajectory is used in `reuse`
    updates. In all methods, `pools` is the number of vector environments (pools) of the run, and `num_envs` is the
    number of environments in each pool.

    An algorithm may own parameters and state. The constructor gets only the options; `setup` gets the agent.
    `parameters` returns the parameters that are trained in addition to those of the agent. `save` and `load` save the
    state in checkpoints and restore it.
    """

    on_policy = False  # True if rollouts must be collected with the newest weights; actors then wait during updates
    mean_loss = False  # True if the learner divides the gradient by the number of steps in the batch
    batch_size_hint = "--batch-size"  # the change that messages advise to the user for larger batches

    @dataclass(frozen=True)
    class Options(ActorCriticOptions):
        rollout_length: int = option(20, "number of steps per rollout (T)", low=1, high=100_000, unprefixed=True)
        batch_size: int = option(4, "number of trajectories per update (B)", low=1, high=100_000, unprefixed=True)
        reuse: int = option(1, "number of updates that use each trajectory", low=1, high=100)
        optimizer: str = option(
            "adam",
            "optimizer (rmsprop: as in PyTorch and TorchBeast; rmsprop_tf: as in TensorFlow and the IMPALA paper)",
            choices=("adam", "rmsprop", "rmsprop_tf"),
        )
        alpha: float = option(
            0.99, "rmsprop, rmsprop_tf: decay factor of the running mean of squared gradients", low=0, high=1
        )
        momentum: float = option(0.0, "rmsprop, rmsprop_tf: momentum", low=0)

    options: Any  # instance of Options; must have lr, lr_schedule (a key of SCHEDULES) and max_grad_norm

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    @classmethod
    def derive_options(cls, options: Any, context: RunContext) -> Any:
        """Return the options. Set reward clipping, reward scale and batch size if the user did not set them."""
        if isinstance(options, ActorCriticOptions):
            options = options.derive_rewards(context)
        if isinstance(options, Algorithm.Options) and context.num_tasks > 1 and "batch_size" not in context.given:
            options = cls._scale_batch_size(options, context)
        return options

    @classmethod
    def _scale_batch_size(cls, options: Any, context: RunContext) -> Any:
        """Return the options with the default batch size multiplied by the number of tasks.

        An update then has as many trajectories per task as in a run with a single task. With smaller batches, the
        gradient of a task would be smaller than the gradient noise of the other tasks.

        If this batch size does not fit a number of environments chosen by the user, the largest smaller multiple of the
        number of tasks that fits is used. If no multiple fits, the batch size is not reduced.
        """
        sizes = [per_task * context.num_tasks for per_task in range(options.batch_size, 0, -1)]
        candidates = [replace(options, batch_size=size) for size in sizes]
        n, pools = context.pool_size, context.total_pools
        if not context.num_envs_given or n == 0:
            return candidates[0]
        fitting = [
            candidate
            for candidate in candidates
            if cls(candidate).can_split(context.learners, n, pools)
            and cls(candidate).fits_exactly(n, pools)
            and not cls(candidate).validate(n, pools)
        ]
        return fitting[0] if fitting and context.equal_pools else candidates[0]

    # --- loss and batches ---

    def loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """Return the loss of a batch, summed over all steps. `progress` is the finished fraction of the run, 0 to 1."""
        raise RunError(f"{type(self).__name__} must define loss(self, agent, batch, progress)")

    def batches(self, rollouts: Sequence[Rollout], context: LearnContext) -> Batches:
        """Divide the rollouts into batches, and yield one batch for each update.

        This is a generator: `metrics = yield Batch(...)` returns the metrics of the update. `loss` receives only one
        micro-batch at a time. This method must therefore compute all quantities that depend on the whole batch, for
        example normalised advantages, and pass them to `loss` in `Rollout.extras`.
        """
        trajectories = concatenate(rollouts)
        for _ in range(self.options.reuse):
            for batch in trajectories.split(self.options.batch_size):
                yield Batch(batch, self.loss)

    # --- sizes ---

    @property
    def sequence_length(self) -> int:
        """The length of the rollouts that actors collect, in steps."""
        return self.options.rollout_length

    def rollouts_per_learn(self, num_envs: int, pools: int) -> int:
        """Return the number of rollouts that one call of `batches` receives.

        `pools` is the number of vector environments. Each has `num_envs` environments or, if the numbers are unequal,
        at least `num_envs`. Rollout i comes from the vector environment i % pools.

        The learner passes a multiple of `batch_size(...)` trajectories to `batches`. The remaining trajectories wait
        for the next call (see `learn_call_sizes.py`). An on-policy algorithm receives all trajectories of the rollouts.
        """
        return -(-self.options.batch_size // num_envs)  # rounded up

    def batch_size(self, num_envs: int, pools: int) -> int:
        """Return the number of new trajectories per update."""
        return self.options.batch_size

    @property
    def epochs(self) -> int:
        """The maximum number of updates that use the same new trajectory. Replays from a buffer are not counted."""
        return self.options.reuse

    def validate(self, num_envs: int, pools: int) -> list[str]:
        """Return error messages if the rollouts of the run cannot be split into batches, else an empty list."""
        return []

    def fits_exactly(self, num_envs: int, pools: int) -> bool:
        """Return True if the rollouts can be divided into batches of equal size, so that no trajectory waits.

        If the user has not set the number of environments or the batch size, they are chosen such that this is True.
        """
        if size_problems(self, num_envs, pools):
            return False
        return self.rollouts_per_learn(num_envs, pools) * num_envs % self.batch_size(num_envs, pools) == 0

    def dummy_batch(self, rollout: Rollout) -> Batch:
        """Return a batch made of one rollout. The learner uses it only to measure the time of an update."""
        return Batch(rollout, self.loss)

    def shard(self, learners: int) -> Self | None:
        """Return a copy of the algorithm for one learner of a group. `learners` is the size of the group.

        Each learner processes an equal part of each batch, so the copy has the batch size `batch_size / learners`.
        Return None if `batch_size` is not divisible by `learners`.
        """
        if self.options.batch_size % learners:
            return None
        return type(self)(replace(self.options, batch_size=self.options.batch_size // learners))

    def can_split(self, learners: int, num_envs: int, pools: int) -> bool:
        """Return True if `learners` learners can share each batch equally.

        With several learners, no trajectory may wait for the next learn call.
        """
        if learners == 1:
            return True
        part = self.shard(learners)
        if part is None or num_envs % learners or min(self.batch_size(num_envs, pools), num_envs) % learners:
            return False
        if not self.fits_exactly(num_envs, pools) or not part.fits_exactly(num_envs // learners, pools):
            return False
        return not part.validate(num_envs // learners, pools)

    @property
    def return_discount(self) -> float | None:
        """The discount factor of the returns that the actors compute for reward normalisation; None: not needed."""
        o = self.options
        normalises = isinstance(o, ActorCriticOptions) and o.reward_clipping == "return_std"
        return o.discount if normalises else None

    # --- parameters, optimizers and state ---

    def setup(self, agent: Agent) -> None:
        """Create the algorithm's own parameters, if it has any.

        The learner calls this method once, before `loss`, `batches`, `parameters`, `make_optimizers`, `save` and
        `load`. At this time, the agent is already on its device and has its initial weights.
        """

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the algorithm's own parameters by name.

        The learner trains and saves these parameters together with the agent's parameters.
        """
        return {}

    def make_optimizers(self, parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by name. `parameters` are the agent's parameters, followed by the algorithm's own.

        Before each update, the learner sets the learning rate of each parameter group to the current rate of the
        schedule. If a group has the entry `lr_factor`, its rate is multiplied by this factor.
        """
        o = self.options
        if o.optimizer == "adam":
            return {MAIN_OPTIMIZER: make_adam(parameters, o.lr, o.eps)}
        rmsprop = RMSprop if o.optimizer == "rmsprop" else RMSpropTF
        return {MAIN_OPTIMIZER: rmsprop(parameters, lr=o.lr, alpha=o.alpha, eps=o.eps, momentum=o.momentum)}

    def save(self) -> Tensors:
        """Return the algorithm's state as tensors by name, for a checkpoint.

        Leave out the parameters returned by the method `parameters`, because the learner itself saves them.
        """
        return {}

    def load(self, tensors: Tensors) -> None:
        """Restore the state from `tensors`, the result of `save`."""

    def stored_extras(self, num_actions: int) -> dict[str, tuple[int, ...]] | None:
        """Describe the trajectories in the result of `save`. Return None if it contains no trajectories.

        Otherwise, return {name: shape} of the extra tensors of a trajectory; the shapes do not contain the axes for
        time and batch. Before a checkpoint is loaded, its tensors are checked against these shapes.
        """
        return None

    def normalised_extras(self) -> dict[str, tuple[int, ...]]:
        """Return the extras that the learner adds for the normalisation of rewards, in the form of `stored_extras`."""
        return {} if self.return_discount is None else {NORMALISED_REWARD: ()}

    @property
    def inherits_state(self) -> bool:
        """True if `load_pretrained` loads state from the run given by --init-from. Default: False."""
        return False

    def load_pretrained(self, tensors: Tensors, task_indices: Sequence[int]) -> str:
        """Load state of the run given by --init-from, the "other run". Both runs have the same algorithm.

        `tensors` is the state that `save` returned in the other run. `task_indices[k]` is the index, in this run, of
        task k of the other run, or -1 if this run does not have this task. Return a text that describes what was
        loaded, or an empty text if nothing was loaded. By default, nothing is loaded.
        """
        return ""


def size_problems(algorithm: Algorithm, num_envs: int, pools: int) -> list[str]:
    """Return a message for each size of an algorithm, for example `epochs`, that is not an integer of at least 1."""
    sizes = {
        "sequence_length": algorithm.sequence_length,
        "epochs": algorithm.epochs,
        "rollouts_per_learn(num_envs, pools)": algorithm.rollouts_per_learn(num_envs, pools),
        "batch_size(num_envs, pools)": algorithm.batch_size(num_envs, pools),
    }
    return [
        f"{type(algorithm).__name__}: {name} is {size!r}; expected an integer of at least 1"
        for name, size in sizes.items()
        if not isinstance(size, int) or size < 1
    ]
