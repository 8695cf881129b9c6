"""Central inference: one remote process runs the agent for all rollout workers, in batches."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.agents.distributions import Categorical
from bestiary.distributed.serialisation import to_arrays, to_tensors
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.rollout import Inputs
from bestiary.training.actor import Actor
from bestiary.training.devices import autocast, choose_device
from bestiary.training.weights import Weights

CPU = torch.device("cpu")
INPUT_FIELDS = ("reward", "done", "last_action", "task")  # fields of `Inputs`, except `observation`


@dataclass
class InferenceRequest:
    """A request of a rollout worker to run the agent on one time step of a vector environment."""

    min_version: int  # the result must be computed with this version of the weights or a newer one
    inputs: dict[str, Any]  # fields of Inputs as arrays [1,N,...]
    state: list[np.ndarray]  # tensors of the recurrent state as arrays [N,...]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None  # when done: (version of the weights, logits, values, next recurrent state)
    error: BaseException | None = None


class InferenceServer:
    """Ray process that owns a copy of the agent and answers the requests of all rollout workers.

    Requests that arrive while a batch is being computed form the next batch. Each batch uses the newest weights.
    """

    def setup(self, shipped_config: ShippedConfig, use_gpu: bool) -> None:
        """Build the agent and start the thread that answers requests."""
        torch.set_num_threads(1)
        config = shipped_config.load()
        self.device = choose_device(config.training.device) if use_gpu else CPU
        self.agent = config.make_agent().to(self.device)
        self.precision = config.training.precision
        self.version = -1  # version of the weights in the agent
        self.newest_version = -1  # version of newest_weights
        self.newest_weights: list[np.ndarray] = []
        self.requests: list[InferenceRequest] = []
        self.changed = threading.Condition()  # notified when requests or weights arrive
        threading.Thread(target=self._serve, daemon=True).start()

    def set_weights(self, version: int, weights: list[np.ndarray]) -> None:
        """Store new weights for the next batch. If newer weights have already been received, do nothing."""
        with self.changed:
            if version > self.newest_version:
                self.newest_version = version
                self.newest_weights = weights
            self.changed.notify()

    def answer(self) -> None:
        """Do nothing. The driver calls this method to check that the process is not stopped."""

    def infer(self, min_version: int, inputs: dict[str, Any], state: list[np.ndarray]) -> Any:
        """Run the agent on one time step of a vector environment, with weights of at least version `min_version`.

        If no such weights have arrived yet, wait.

        Returns:
            The version of the weights used, logits [1,N,A], values [1,N], and the next recurrent state.
        """
        request = InferenceRequest(min_version, inputs, state)
        with self.changed:
            self.requests.append(request)
            self.changed.notify()
        request.done.wait()
        if request.error is not None:
            raise request.error
        return request.result

    def _serve(self) -> None:
        """Answer requests in batches until the process ends."""
        torch.set_num_threads(1)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: any(r.min_version <= self.newest_version for r in self.requests))
                version = self.newest_version
                weights = self.newest_weights
                batch = [r for r in self.requests if r.min_version <= version]
                self.requests = [r for r in self.requests if r.min_version > version]
            try:
                self._run_batch(batch, version, weights)
            except BaseException as error:
                for request in batch:
                    request.error = error
            for request in batch:
                request.done.set()

    @torch.no_grad()
    def _run_batch(self, batch: list[InferenceRequest], version: int, weights: list[np.ndarray]) -> None:
        """Run the agent once for all requests of a batch, and store the result in each request."""
        if version != self.version:
            tensors = tuple(tensor.to(self.device) for tensor in to_tensors(weights))
            Weights(version, tensors).load_into(self.agent)
            self.version = version
        inputs = _join_inputs([request.inputs for request in batch]).to(self.device)
        columns = zip(*(request.state for request in batch), strict=True)
        state = tuple(torch.cat(to_tensors(column)).to(self.device) for column in columns)
        with autocast(self.device, self.precision):
            output, next_state = self.agent(inputs, state)
        sizes = [request.inputs["done"].shape[1] for request in batch]
        logits = output.distribution.logits.cpu().split(sizes, dim=1)
        values = output.value.cpu().split(sizes, dim=1)
        next_states = [tensor.cpu().split(sizes) for tensor in next_state]
        for k, request in enumerate(batch):
            own_state = [tensors[k].numpy() for tensors in next_states]
            request.result = version, logits[k].numpy(), values[k].numpy(), own_state


class RemotePolicy:
    """Object that an `Actor` calls like an agent. It passes inputs to the inference server and returns the result."""

    def __init__(self, agent: Agent, server: Any):
        self.agent = agent  # local agent, used only for the initial recurrent state
        self.server = server  # handle of the InferenceServer
        self.min_version = 0  # the server must use this version of the weights or a newer one
        self.actor: Actor | None = None  # each call sets `actor.version` to the version of the weights used

    def initial_state(self, batch_size: int) -> State:
        return self.agent.initial_state(batch_size)

    def __call__(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        """Let the inference server run the agent on inputs [1,N]. Return the output and the next recurrent state."""
        import ray

        arrays: dict[str, Any] = {name: getattr(inputs, name).numpy() for name in INPUT_FIELDS}
        arrays["observation"] = {kind: tensor.numpy() for kind, tensor in inputs.observation.items()}
        call = self.server.infer.remote(self.min_version, arrays, to_arrays(state))
        version, logits, value, next_state = ray.get(call)
        assert self.actor is not None
        self.actor.version = version
        output = Output(Categorical(torch.tensor(logits)), torch.tensor(value))
        return output, tuple(torch.tensor(array) for array in next_state)


def _join_inputs(inputs: list[dict[str, Any]]) -> Inputs:
    """Concatenate the inputs of several requests along the batch axis."""

    def join(arrays: list[np.ndarray]) -> Tensor:
        return torch.cat(to_tensors(arrays), dim=1)

    observation = {kind: join([one["observation"][kind] for one in inputs]) for kind in inputs[0]["observation"]}
    return Inputs(observation, *(join([one[name] for one in inputs]) for name in INPUT_FIELDS))
