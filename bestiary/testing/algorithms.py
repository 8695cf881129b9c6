"""The function `check_algorithm`, which checks an algorithm."""

import contextlib
import io
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from bestiary import api
from bestiary.algorithms.contract_checks import algorithm_problem
from bestiary.config.components import REGISTRIES
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.testing.algorithm_checks import AlgorithmChecks
from bestiary.testing.problem_report import ComponentError, Report, component_name, find_component
from bestiary.utils import trust
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import construct

NUM_LEARN_CALLS = 3  # number of learn calls in each training run
# Numbers of environments. The first number that the algorithm accepts is used.
NUM_ENVS = (8, 32)


def check_algorithm(component: Any, env: str = "toy/catch", agent: str = "basic", /, **options: Any) -> None:
    """Check the losses, batches, parameters and saved state of an algorithm, and its gradients in micro-batches.

    Then perform two short training runs, one with the serial runtime and one with the local runtime. Their run folders
    are deleted afterwards.

    Args:
        component: class, `path/to/file.py:Name`, or name of a built-in algorithm.
        env: name of the environment.
        agent: name of the agent.
        options: options of the algorithm, for example `rollout_length=5`.

    Raises:
        ComponentError: the algorithm breaks a rule. The message lists all problems, one line each.
    """
    if isinstance(component, type) and (problem := algorithm_problem(component)) is not None:
        raise ComponentError(f"{component_name(component)}: {problem} (see docs/extending.md#algorithm)")
    found = find_component("algo", component, options, num_arguments=1)
    report = found.report
    given = {"env": env, "agent": agent, **{f"algo.{name}": value for name, value in options.items()}}
    with registered(component, found.cls) as given["algo"]:

        def check() -> None:
            with report.errors_of("the constructor"):
                construct(found.cls, options=found.options)
            config = make_config(report, {**given, "runtime": "serial", "micro_batch_size": 2})
            AlgorithmChecks(report, config).run()

        report.run(check)
        if not report.problems:
            report.run(lambda: train(report, given, "serial"), lambda: train(report, given, "local"))
    report.finish()


@contextlib.contextmanager
def registered(component: Any, cls: type) -> Iterator[str]:
    """Yield the name that selects the algorithm in a config.

    If `component` is a name, yield this name. Otherwise register the class under a temporary name and yield that name.
    """
    if isinstance(component, str):
        yield trust.named_by_user(component)
        return
    registry = REGISTRIES["algo"]
    assert isinstance(registry, MutableMapping)
    name = f"{cls.__module__}.{cls.__qualname__}"
    registry[name] = cls
    try:
        yield name
    finally:
        del registry[name]


def make_config(report: Report, given: dict[str, Any]) -> Config:
    """Return a config with the options `given`, and the first number of NUM_ENVS that the algorithm accepts."""
    problems: tuple[str, ...] = ()
    for num_envs in NUM_ENVS:
        try:
            return resolve({**given, "num_envs": num_envs, "steps": 10**6})
        except UserError as error:
            problems = error.problems
        except Exception as error:
            problems = (f"the configuration failed: {report.describe(error)}",)
    report.require(*problems)
    raise AssertionError


def train(report: Report, given: dict[str, Any], runtime: str) -> None:
    """Train for a few learn calls in a temporary folder and check that no update was skipped."""
    config = make_config(report, {**given, "runtime": runtime, "micro_batch_size": 2})
    training = config.training
    algorithm = config.make_algorithm()
    num_rollouts = algorithm.rollouts_per_learn(training.pool_size, training.total_pools)
    steps = NUM_LEARN_CALLS * num_rollouts * training.pool_size * algorithm.sequence_length
    options = {**given, "runtime": runtime, "micro_batch_size": 2, "num_envs": training.num_envs, "log_every": 1}
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
                run = api.train(**options, steps=steps, run_dir=str(Path(folder) / "run"))
            skipped = run.metrics["skipped_updates"][-1]
            updates = run.metrics["updates"][-1]
        except (UserError, RunError) as error:
            report.require(f"training with --runtime {runtime} failed: {' '.join(str(error).split())}")
        except Exception as error:
            report.require(f"training with --runtime {runtime} failed: {report.describe(error)}")
    if skipped:
        report.require(f"training with --runtime {runtime}: {skipped:.0f} updates were not finite and were skipped")
    if not updates:
        report.require(
            f"training with --runtime {runtime}: {steps} steps gave no update; the method batches must yield a batch"
        )
