"""Training of a run on a Ray cluster: connect to Ray, check the cluster, train, and restart if learners are lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bestiary.config.config import Config
from bestiary.distributed.driver import Driver
from bestiary.distributed.faults import LearnersLostError, RestartCounter
from bestiary.distributed.placement import check_cluster
from bestiary.distributed.ray_connection import connect_to_ray
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.run import Run
from bestiary.training.callbacks.factory import make_callbacks
from bestiary.training.factory import make_initial_agent, make_learner
from bestiary.training.run_training import load_checkpoint, raise_if_interrupted
from bestiary.training.session import Session
from bestiary.training.warm_start import load_pretrained_state


@contextmanager
def connect_cluster(config: Config) -> Iterator[Any]:
    """Connect to Ray, check the cluster, and yield the ray module. Disconnect at the end.

    If the run uses no cluster, yield None.
    """
    training = config.training
    if training.cluster is None:
        yield None
        return
    with connect_to_ray(training.cluster, training.trust_open_cluster) as ray:
        check_cluster(ray, config)
        yield ray


def train_on_cluster(run: Run, config: Config, checkpoint: Checkpoint | None, ray: Any) -> None:
    """Train a run on a Ray cluster. If a learner is lost, restart the training from the newest checkpoint."""
    restarts = RestartCounter(config.training.max_restarts, _count_restarts(checkpoint))
    while True:
        start_step = checkpoint.steps if checkpoint else 0
        agent = make_initial_agent(config, new=checkpoint is None)
        learner = make_learner(config, agent, torch.device("cpu"))
        if checkpoint is None:
            load_pretrained_state(config, learner.algorithm)
        saved_state = load_checkpoint(config, learner, checkpoint)
        try:
            with Session(run, config, learner, dict, make_callbacks(config), saved_state) as session:
                Driver(ray, ShippedConfig.from_config(config), learner, session, restarts, start_step).run()
            return raise_if_interrupted(run, session)
        except LearnersLostError as lost:
            if session.interrupts.received is not None:
                return raise_if_interrupted(run, session)
            checkpoint = checkpoints.newest_intact(run.path / "checkpoints")
            point = f"the newest checkpoint, step {checkpoint.steps}" if checkpoint else "step 0 (no checkpoint yet)"
            restarts.record(f"{lost}; training resumes from {point}")


def _count_restarts(checkpoint: Checkpoint | None) -> int:
    """Return how many restarts of remote processes a checkpoint has recorded, or 0 if there is no checkpoint."""
    return checkpoint.load_state().get("runtime_counters", {}).get("restarts", 0) if checkpoint else 0
