"""The remote learner: a process that computes updates.

If there are several learners, each of them computes the gradient of a part of each batch.
"""

import fcntl
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bestiary.distributed.faults import GroupSplitError, error_summary
from bestiary.distributed.serialisation import pack_state, to_arrays, unpack_rollout, unpack_state
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.rollout import Rollout
from bestiary.training.devices import choose_device
from bestiary.training.factory import make_learner
from bestiary.training.learner import Gradient
from bestiary.utils import plugins
from bestiary.utils.cpu import num_cores
from bestiary.utils.errors import RunError
from bestiary.utils.temp_dirs import make_temp_dir

CPU = torch.device("cpu")
SIOCGIFADDR = 0x8915  # number of the Linux ioctl call that returns the address of a network interface


@dataclass
class UpdateResult:
    """The result of one learn call: all updates computed from some rollouts."""

    metrics: list[dict[str, float]]  # one per update
    counters: dict[str, int]  # see Learner.counters
    consecutive_skips: int  # number of skipped updates since the last update that was not skipped
    critic_statistics: dict[str, np.ndarray]  # buffers of a critic with running statistics; empty for other critics
    wait_seconds: float  # time between the end of the previous learn call and the start of this call
    weights: Any = None  # object reference of the new weights; only the learner of rank 0 sets it


class LearnerWorker:
    """Ray process that owns a `Learner`. In a group, each learner computes the gradient of its part of each batch."""

    def setup(self, shipped_config: ShippedConfig, rank: int, use_gpu: bool, learners_on_node: int) -> None:
        """Build the `Learner` of this process.

        Args:
            shipped_config: configuration of the run.
            rank: index of this learner in the group.
            use_gpu: whether Ray has assigned a GPU to this process.
            learners_on_node: number of learners on this node, including this one. They share the cores of the node.
        """
        torch.set_num_threads(1)
        config = shipped_config.load()
        training = config.training
        self.rank = rank
        self.rollouts: dict[int, Rollout] = {}  # rollout ID -> fetched rollout
        device = choose_device(training.device) if use_gpu else CPU
        self.learner = make_learner(config, config.make_agent(), device, training.learners)
        default_threads = max(1, num_cores() // learners_on_node) if device.type == "cpu" else 1
        threads = training.learner_threads or default_threads
        self.gradient_threads = ThreadPoolExecutor(threads, "gradients", torch.set_num_threads, (1,))
        self.learner.parallel_map = self.gradient_threads.map
        self.idle_since = time.monotonic()
        if training.learners > 1:
            self.learner.num_learners = training.learners
            self.learner.all_reduce_gradient = all_reduce_gradient
            self.learner.all_reduce = all_reduce

    def answer(self) -> None:
        """Do nothing. The driver calls this method to check that the process is not stopped."""

    # --- learner group ---

    def node_address(self) -> str:
        """Return the IP address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def choose_rendezvous(self, same_node: bool) -> str:
        """Return the URL that all learners pass to `join_group` to find each other.

        If all learners are on this node, the URL names a file of the node. Otherwise it names a free port of the node.
        """
        if same_node:
            return f"file://{make_temp_dir('bestiary-rendezvous-') / 'learners'}"
        address = self.node_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def join_group(self, rendezvous: str, num_learners: int, same_node: bool, shared_gpu: bool, timeout: float) -> None:
        """Form a process group with the other learners.

        Args:
            rendezvous: the URL of `choose_rendezvous`.
            num_learners: size of the group.
            same_node: whether all learners are on this node. They then use the loopback interface.
            shared_gpu: whether several learners use one GPU. They then use Gloo, because NCCL does not support this.
            timeout: time limit of this call and of each later collective operation, in seconds.
        """
        interface = "lo" if same_node else find_interface(self.node_address())
        if interface is not None:
            # Without this setting, Gloo and NCCL use the address to which the host name resolves. This is often the
            # loopback address, which other nodes cannot reach.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ["NCCL_SOCKET_IFNAME"] = interface
        backend = "nccl" if self.learner.device.type == "cuda" and not shared_gpu else "gloo"
        with collective_operation():
            dist.init_process_group(
                backend,
                init_method=rendezvous,
                rank=self.rank,
                world_size=num_learners,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()
        if same_node and self.rank == 0:
            shutil.rmtree(Path(rendezvous.removeprefix("file://")).parent, ignore_errors=True)

    # --- state ---

    def load_state(self, state: Any, counters: dict[str, int]) -> None:
        """Load the state and the counters of another learner. `state` is a result of `pack_state`."""
        self.learner.load(unpack_state(state), counters)

    def save_state(self) -> tuple[Any, dict[str, int]]:
        """Return the state of the learner as arrays, and its counters."""
        return pack_state(self.learner.save()), self.learner.counters()

    def put_weights(self) -> Any:
        """Copy the current weights to Ray's object store and return their object reference."""
        import ray

        return ray.put(to_arrays(list(self.learner.agent.state_dict(keep_vars=True).values())))

    # --- rollouts ---

    def fetch_rollout(self, rollout_id: int, reference: list[Any]) -> None:
        """Copy this learner's part of a rollout to this process. The call may run in parallel with `learn`.

        Args:
            rollout_id: ID of the rollout.
            reference: list that contains the object reference of the `Payload`. The reference is in a list, because Ray
                replaces an argument that is a reference by the object itself.
        """
        import ray

        self.rollouts[rollout_id] = unpack_rollout(ray.get(reference[0]))

    def discard_rollout(self, rollout_id: int) -> None:
        """Delete this learner's part of a rollout, if it was fetched."""
        self.rollouts.pop(rollout_id, None)

    def learn(self, rollout_ids: list[int]) -> UpdateResult:
        """Compute all updates from some fetched rollouts.

        Raises:
            RunError: code of a plug-in raised an exception. The message names the file and line.
        """
        wait_seconds = time.monotonic() - self.idle_since
        torch.set_num_threads(1)
        learner = self.learner
        try:
            metrics = learner.learn([self.rollouts.pop(rollout_id) for rollout_id in rollout_ids])
        except Exception as error:
            # The driver does not receive the traceback, so the line of the plug-in is added to the message here.
            description = plugins.describe_error(error)
            if description is not None:
                raise RunError(description) from error
            raise
        statistics = {} if learner.popart is None else critic_statistics(learner.popart)
        weights = self.put_weights() if self.rank == 0 else None
        self.idle_since = time.monotonic()
        return UpdateResult(metrics, learner.counters(), learner.consecutive_skips, statistics, wait_seconds, weights)


def critic_statistics(critic: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the running statistics of a critic, which are its buffers, as arrays by name."""
    return {name: buffer.cpu().numpy() for name, buffer in critic.named_buffers(recurse=False)}


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all learners. The result is bit for bit the same in all learners."""
    total = tensor.clone()
    with collective_operation():
        dist.all_reduce(total)
    return total


def all_reduce_gradient(own: Gradient) -> Gradient:
    """Return the sum of the gradients of all learners. The result is bit for bit the same in all learners."""
    device = own.tensors[0].device
    scalars = [*own.sums.values(), torch.tensor(float(own.num_steps), device=device)]
    flat = torch.cat([*(t.flatten() for t in own.tensors), *(s.detach().float().reshape(1) for s in scalars)])
    with collective_operation():
        dist.all_reduce(flat)
    pieces = flat.split([*(t.numel() for t in own.tensors), *[1] * len(scalars)])
    count = len(own.tensors)
    tensors = tuple(piece.view_as(t) for piece, t in zip(pieces[:count], own.tensors, strict=True))
    sums = {name: piece[0] for name, piece in zip(own.sums, pieces[count:], strict=False)}
    moments = own.target_moments
    if moments is not None:
        moments = moments.clone()
        with collective_operation():
            dist.all_reduce(moments)
    return Gradient(tensors, sums, moments, round(float(pieces[-1][0])))


@contextmanager
def collective_operation() -> Iterator[None]:
    """Context for an operation in which all learners take part. It turns a RuntimeError into GroupSplitError."""
    try:
        yield
    except RuntimeError as error:
        raise GroupSplitError(error_summary(error)) from error


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has the given IPv4 address, or None if no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # the interface has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
