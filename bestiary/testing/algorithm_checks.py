"""Checks of an algorithm in a learner: parameters, batches, losses, gradients, saved state, and several learners."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from bestiary.algorithms.base import Algorithm, Batch, Loss, size_problems
from bestiary.algorithms.contract_checks import batch_problem, loss_problem
from bestiary.algorithms.learn_call_sizes import LearnSizes
from bestiary.algorithms.replay_buffer import pack_trajectories
from bestiary.config.config import Config
from bestiary.distributed.serialisation import shard
from bestiary.rollout import Rollout
from bestiary.testing.problem_report import Report, StageFailed
from bestiary.training.factory import make_actors_and_learner, make_learner
from bestiary.training.learner import CPU, Learner
from bestiary.training.serial import collect_rollouts

NUM_LEARN_CALLS = 3  # number of learn calls whose batches are checked
MAX_CHECKED_BATCHES = 2  # for each loss function and optimizer: number of batches whose gradients are checked
# The gradient of a batch must equal the sum of the gradients of its two halves. TOLERANCE is the largest accepted
# difference, as a fraction of the largest entry. Rounding causes a difference of about 1e-5.
TOLERANCE = 1e-3


class AlgorithmChecks:
    """Checks of one algorithm, with an actor and a learner that are built from a config."""

    def __init__(self, report: Report, config: Config):
        self.report = report
        self.config = config
        self.num_checked: dict[str, int] = {}  # name of loss function and optimizer -> number of batches
        self.has_gradient = False  # True if the gradient of at least one loss was not zero

    def run(self) -> None:
        """Run all checks. After most failures, the later checks are skipped, because they need the earlier results."""
        report = self.report
        self.check_sizes()
        with report.errors_of("construction of agent and learner"):
            (actor,), learner = make_actors_and_learner(self.config)
        with closing(actor.pool):
            self.check_parameters(learner)
            actor.start()
            rollouts = collect_rollouts(actor, learner)
            self.check_dummy_batch(learner, rollouts[0])
            for _ in range(NUM_LEARN_CALLS):
                self.check_learn(learner, rollouts)
                actor.version = learner.version
                rollouts = collect_rollouts(actor, learner)
        if not self.has_gradient:
            report.add("the gradients of all losses are zero; Loss.total must depend on the output of the agent")
        report.run(lambda: self.check_save(learner, rollouts), lambda: self.check_shard(learner, rollouts))

    # --- single checks ---

    def check_sizes(self) -> None:
        """Check that sequence length, epochs, rollouts per learn call and batch size are integers of at least 1."""
        num_envs, pools = self.config.training.pool_size, self.config.training.total_pools
        with self.report.errors_of("the constructor"):
            algorithm = self.config.make_algorithm()
        with self.report.errors_of("sequence_length, epochs, rollouts_per_learn or batch_size"):
            problems = size_problems(algorithm, num_envs, pools)
        self.report.require(*problems)

    def check_parameters(self, learner: Learner) -> None:
        """Check that each of the algorithm's own parameters is trained by an optimizer."""
        own = learner.algorithm.parameters()
        trained = {id(p) for optimizer in learner.optimizers.values() for p in optimizer.parameters}
        for name, parameter in own.items():
            if id(parameter) not in trained:
                self.report.add(f"parameters()[{name!r}] is in none of the optimizers that make_optimizers returns")

    def check_dummy_batch(self, learner: Learner, rollout: Rollout) -> None:
        """Check the batch with which auto-tuning measures the time of an update."""
        with self.report.errors_of("dummy_batch (for auto-tuning)"):
            batch = learner.algorithm.dummy_batch(rollout)
        problem = batch_problem(batch, learner.optimizers)
        self.report.require(*([f"dummy_batch: {problem.replace('yielded', 'returned')}"] if problem else []))
        try:
            self.call(learner, batch, batch.rollout, "the loss of dummy_batch")
        except StageFailed:
            self.report.problems[-1] += (
                "; if loss needs Rollout.extras that batches adds, dummy_batch must add them, too"
            )
            raise

    def check_learn(self, learner: Learner, rollouts: Sequence[Rollout]) -> None:
        """Perform the updates of one learn call and check each batch."""
        report, algorithm = self.report, learner.algorithm
        num_envs, pools = self.config.training.pool_size, self.config.training.total_pools
        with report.errors_of("batches"):
            batches = algorithm.batches(rollouts, learner.context())
            if not inspect.isgenerator(batches):
                report.require(f"batches returned a {type(batches).__name__}; it must be a generator, with yield")
            batch: Any = next(batches, None)
        num_updates = 0
        while batch is not None:
            problem = batch_problem(batch, learner.optimizers)
            report.require(*([f"batches {problem}"] if problem else []))
            self.check_batch(learner, batch)
            if not algorithm.on_policy:
                num_new = batch.rollout.num_envs if batch.num_new is None else batch.num_new
                expected = algorithm.batch_size(num_envs, pools)
                if num_new != expected:
                    report.add(
                        f"a batch has {num_new} new trajectories, but batch_size() is {expected}; they must be equal"
                    )
            with report.errors_of("an update"):
                metrics = learner.update(batch)
            num_updates += 1
            with report.errors_of("batches"):
                try:
                    batch = batches.send(metrics)
                except StopIteration:
                    batch = None
        learner.steps += sum(rollout.num_steps for rollout in rollouts)
        limit = LearnSizes.of(algorithm, num_envs, pools).max_updates()
        if not algorithm.on_policy and num_updates > limit:
            report.add(
                f"batches made {num_updates} updates from one set of rollouts, but epochs and batch_size() allow at "
                f"most {limit}; --max-lag relies on this limit"
            )

    def check_batch(self, learner: Learner, batch: Batch) -> None:
        """Check the loss function of a batch: its results, that it is deterministic, and that it changes no input.

        Also check that the gradient for the batch equals the sum of the gradients for its two halves.
        """
        name = getattr(batch.loss, "__name__", "loss")
        kind = f"{name} {batch.optimizer}"
        self.num_checked[kind] = self.num_checked.get(kind, 0) + 1
        before = {key: tensor.clone() for key, tensor in pack_trajectories(batch.rollout).items()}
        loss, gradient = self.call(learner, batch, batch.rollout, name)
        self.has_gradient |= any(bool(g.any()) for g in gradient)
        if self.num_checked[kind] > MAX_CHECKED_BATCHES:
            return
        after = pack_trajectories(batch.rollout)
        changed = [key for key, tensor in before.items() if not _same(tensor, after[key])]
        if changed:
            self.report.require(f"{name} changes {changed[0]} of the rollout in place; make a new tensor")
        _, repeated = self.call(learner, batch, batch.rollout, name)
        if (size := _difference(gradient, repeated)) > TOLERANCE:
            self.report.require(f"{name} is random: the gradients of two equal calls differ by {size:.3g}")
        self.check_parts(learner, batch, name, loss, gradient)

    def check_parts(self, learner: Learner, batch: Batch, name: str, loss: Loss, gradient: Sequence[Tensor]) -> None:
        """Check that the gradient and each entry of `loss.sums` of a batch equal the sums over its two halves.

        `loss` and `gradient` are the loss and the gradient of the whole batch.
        """
        report, size = self.report, batch.rollout.num_envs
        if size == 1:
            return
        results = [self.call(learner, batch, part, name) for part in batch.rollout.split((size + 1) // 2)]
        total = [torch.stack(tensors).sum(0) for tensors in zip(*(g for _, g in results), strict=True)]
        if (difference := _difference(gradient, total)) > TOLERANCE:
            advice = _advice(gradient, total, len(results))
            report.add_once(
                f"parts {name}",
                f"{name}: the gradient of a batch of {size} trajectories differs from the sum of the gradients of its "
                f"{len(results)} parts by {difference:.1%} of its largest entry; {advice}",
            )
        for key, value in loss.sums.items():
            if any(key not in part.sums for part, _ in results):
                report.require(
                    f"{name}: sums[{key!r}] is missing for a part of the batch; all parts need the same names"
                )
            parts = [float(part.sums[key].detach()) for part, _ in results]
            expected = float(value.detach())
            if abs(sum(parts) - expected) > TOLERANCE * max(abs(expected), *map(abs, parts), 1e-3):
                report.add_once(
                    f"sum {key}",
                    f"{name}: sums[{key!r}] is {expected:.6g} for a batch and {sum(parts):.6g} for its parts together; "
                    "it must be a sum over all steps, not a mean (.sum() instead of .mean())",
                )

    def call(
        self, learner: Learner, batch: Batch, rollout: Rollout, name: str = "loss"
    ) -> tuple[Loss, tuple[Tensor, ...]]:
        """Compute the loss of a rollout and its gradient, check both, and return them.

        The loss function and the optimizer are those of `batch`. `name` is the name of the loss function in messages.
        """
        report = self.report
        with report.errors_of(name):
            loss = batch.loss(learner.agent, rollout, learner.progress)
        problem = loss_problem(loss)
        report.require(*([f"{name} {problem}"] if problem else []))
        for key, value in {"total": loss.total, **loss.sums}.items():
            if not bool(torch.isfinite(value.detach()).all()):
                report.require(f"{name}: {key} is {float(value.detach())}; it must be finite")
            if key != "total" and value.requires_grad:
                report.add_once(f"detach {key}", f"{name}: sums[{key!r}] has a gradient; use .detach()")
        if loss.targets is not None and loss.targets.shape != (rollout.length, rollout.num_envs):
            expected = [rollout.length, rollout.num_envs]
            found = list(loss.targets.shape)
            report.add_once("targets", f"{name}: targets have shape {found}; expected [T,B] = {expected}")
        with report.errors_of(f"the backward pass of {name}"):
            parameters = learner.optimizers[batch.optimizer].parameters
            gradient = torch.autograd.grad(loss.total, parameters, materialize_grads=True)
        if not all(bool(torch.isfinite(g).all()) for g in gradient):
            report.require(f"the gradient of {name} is not finite")
        return loss, gradient

    def check_save(self, learner: Learner, rollouts: Sequence[Rollout]) -> None:
        """Save a learner and load its state into a new learner. Check that both then make the same updates."""
        report = self.report
        with report.errors_of("save"):
            state = learner.algorithm.save()
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            report.require("save must return a dict of tensors")
        saved = {file: {k: v.detach().clone() for k, v in tensors.items()} for file, tensors in learner.save().items()}
        with report.errors_of("construction of a second learner"):
            restored = make_learner(self.config, self.config.make_agent(seed=5), CPU)
        with report.errors_of("load"):
            restored.load(saved, learner.counters())
        for other in (learner, restored):
            with report.errors_of("updates after save and load"):
                other.learn([rollout.select(torch.arange(rollout.num_envs)) for rollout in rollouts])
        if (size := _difference(learner.parameters, restored.parameters)) > 0:
            report.require(
                f"after save and load, the next updates differ: they give other weights, by up to {size:.3g} of the "
                "largest weight; save must return all state that changes the updates, and load must restore it"
            )

    def check_shard(self, learner: Learner, rollouts: Sequence[Rollout]) -> None:
        """Check the algorithm returned by `shard(2)`, with which each of two learners processes half of each batch."""
        report, num_learners = self.report, 2
        with report.errors_of("shard(2)"):
            part = self.config.make_algorithm().shard(num_learners)
        if part is None:
            return
        if not isinstance(part, Algorithm) or part is learner.algorithm:
            report.require(f"shard(2) returned a {type(part).__name__}; expected a new algorithm, or None")
        num_envs, pools = self.config.training.pool_size, self.config.training.total_pools
        batch_size = learner.algorithm.batch_size(num_envs, pools)
        sizes = []
        parts = [shard(rollout, 0, num_learners, batch_size) for rollout in rollouts]
        with report.errors_of("batches of shard(2)"):
            for algorithm, given in ((self.config.make_algorithm(), list(rollouts)), (part, parts)):
                other = Learner(copy.deepcopy(learner.agent), algorithm, learner.total_steps, 2)
                sizes.append(next(algorithm.batches(given, other.context())).rollout.num_envs)
        if sizes[0] != num_learners * sizes[1]:
            report.require(
                f"shard(2): with two learners, the batch of each has {sizes[1]} trajectories, but the whole batch has "
                f"{sizes[0]}; return None if a batch cannot be divided"
            )


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference between entries of two lists of tensors, divided by the largest expected entry."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(expected, found, strict=True) if x.numel()]
    scale = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0) / max(scale, 1e-8)


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal. NaN equals NaN."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def _advice(gradient: Sequence[Tensor], total: Sequence[Tensor], num_parts: int) -> str:
    """Return advice for an algorithm that computes a wrong gradient if a batch is split.

    `gradient` is the gradient of a whole batch. `total` is the sum of the gradients of the parts of this batch. The two
    differ, although they should be equal.
    """
    products = sum(float((x * y).sum()) for x, y in zip(gradient, total, strict=True))
    squares = sum(float(x.square().sum()) for x in gradient)
    if abs(products / max(squares, 1e-12) - num_parts) < 0.1:
        return "the loss looks like a mean: use .sum() instead of .mean(), and mean_loss = True to average gradients"
    return "compute quantities of the whole batch, such as normalised advantages, in batches and pass them in extras"
