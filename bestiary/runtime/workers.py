"""What runs inside Ray's actors: a Player plays, a Student learns, an Oracle decides for players that do not themselves.

They hold the very Actor and Learner of the other runtimes; `cluster.py` tells them when to do what. None of them opens a run
folder.
"""

import fcntl
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bestiary import plugins
from bestiary.agents.agent import Agent, Output, State
from bestiary.agents.heads import Categorical
from bestiary.cores import cores
from bestiary.errors import RunError
from bestiary.rollout import Episode, Inputs
from bestiary.runtime.actor import Actor
from bestiary.runtime.answers import first_line
from bestiary.runtime.build import make_actors, make_learner, make_pools
from bestiary.runtime.bundle import Bundle
from bestiary.runtime.devices import autocast, choose_device
from bestiary.runtime.learner import Gradient
from bestiary.runtime.load import Clock
from bestiary.runtime.snapshots import Snapshot
from bestiary.runtime.wire import arrays_of, pack, pack_state, share_of, tensors_of, unpack, unpack_state
from bestiary.temporary import make_folder

CPU = torch.device("cpu")
SIOCGIFADDR = 0x8915  # Linux: "what is the address of this interface?"


def get(reference: Any) -> Any:
    import ray

    return ray.get(reference)


@dataclass
class Played:
    """What the driver hears of a rollout; the rollout itself goes to the learners."""

    first_version: int  # of the weights that made its first decision
    decisions: int
    episodes: list[Episode]
    seconds: dict[str, float]  # by what was done in them


class Player:
    """One process that plays: some of the run's pools, in a thread each, so that one steps while another's agent thinks."""

    def where(self) -> tuple[str, str]:
        """The node of Ray's that this is on, and the name of its machine."""
        import ray

        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    def prepare(self, bundle: Bundle, index: int, at_step: int, life: int, oracle: Any = None) -> None:
        """Build what is needed."""
        torch.set_num_threads(1)
        self.config, self.at_step, self.oracle = bundle.config(), at_step, oracle
        pools = self.config.training.pools
        self.which = range(index * pools, (index + 1) * pools)
        self.lives = [life] * pools
        self.actors = [self._make(number) for number in range(pools)]
        self.clocks = [Clock(f"actor {index}, pool {number}") for number in range(pools)]
        self.seen = [dict(clock.seconds) for clock in self.clocks]

    def _make(self, number: int) -> Actor:
        which, life = range(self.which[number], self.which[number] + 1), self.lives[number]
        (pool,) = make_pools(self.config, which, self.at_step, life)
        agent = (
            self.config.make_agent(pool) if self.oracle is None else Asking(self.config.make_agent(pool), self.oracle)
        )
        (actor,) = make_actors(self.config, [pool], [agent], which, CPU, self.at_step, life)  # type: ignore[list-item]
        if isinstance(agent, Asking):
            agent.actor = actor
        actor.version = -1  # so that it takes whatever weights it is given first
        return actor

    def play(self, number: int, version: int, weights: list[np.ndarray], batch_size: int) -> Any:
        """A rollout of one of the pools, from its first decision to its last with these weights; a share for each learner."""
        torch.set_num_threads(1)
        actor, clock = self.actors[number], self.clocks[number]
        clock.seconds["waiting"] += time.monotonic() - clock.since if clock.phase == "waiting" else 0.0
        try:
            if actor.newest is None:
                actor.start()
            if isinstance(actor.agent, Asking):
                actor.agent.wanted = version
            elif version != actor.version:
                Snapshot(version, tensors_of(weights)).put_into(actor.agent)
                actor.version = version
            rollout = None
            while rollout is None:
                with clock.during("inference"):
                    actor.act()
                with clock.during("environment"):
                    rollout = actor.receive()
        except BaseException:
            self.lives[number] += 1000  # other seeds than any life that the driver gives
            actor.pool.close()
            self.actors[number] = self._make(number)
            raise
        finally:
            clock.phase, clock.since = "waiting", time.monotonic()
        before, self.seen[number] = self.seen[number], dict(clock.seconds)
        seconds = {phase: clock.seconds[phase] - before[phase] for phase in before}
        stacked = getattr(actor.pool, "stacked", {})
        learners = self.config.training.learners
        shares = [pack(share_of(rollout, rank, learners, batch_size), stacked) for rank in range(learners)]
        return Played(int(rollout.version[0, 0]), rollout.decisions, rollout.episodes, seconds), *shares

    def progress(self) -> list[int]:
        """Decisions made so far, by pool."""
        return [actor.steps for actor in self.actors]


# --- learning ---


@dataclass
class Lesson:
    """What the driver hears of some rollouts that were learnt from."""

    metrics: list[dict[str, float]]
    counters: dict[str, int]
    skipped_in_a_row: int
    statistics: dict[str, np.ndarray]  # of a critic that adapts
    waited: float  # seconds with nothing to learn from
    weights: Any = None  # a reference to the new ones


class Parted(Exception):
    """Learners do not hear of each other any more."""


@contextmanager
def parting() -> Iterator[None]:
    """What goes wrong in here goes wrong between learners."""
    try:
        yield
    except RuntimeError as error:
        raise Parted(first_line(error)) from error


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class Student:
    """One process that learns; with others, each from its share of every batch."""

    def prepare(self, bundle: Bundle, rank: int, gpu: bool, neighbours: int) -> None:
        """`neighbours`: learners on this machine, this one included."""
        torch.set_num_threads(1)
        config = bundle.config()
        training, self.rank, self.held = config.training, rank, dict[int, Any]()
        device = choose_device(training.device) if gpu else CPU
        self.learner = make_learner(config, bundle.interface, config.make_agent(bundle.interface), device)
        workers = training.workers or (max(1, cores() // neighbours) if device.type == "cpu" else 1)
        self.gradients = ThreadPoolExecutor(workers, "gradients", torch.set_num_threads, (1,))
        self.learner.map = self.gradients.map
        self.since = time.monotonic()
        if training.learners > 1:
            shared = self.learner.algorithm.share(training.learners)
            assert shared is not None
            self.learner.algorithm, self.learner.learners = shared, training.learners
            self.learner.total = _sum_of_all

    def where(self) -> str:
        """The address of this machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def choose_meeting(self, together: bool) -> str:
        """Where all learners are to meet: in a file where they are on one machine, this one, or else at a port of it."""
        if together:
            return f"file://{make_folder('bestiary-meeting-') / 'learners'}"
        address = self.where()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def join(self, meeting: str, learners: int, together: bool, shared: bool, timeout: float) -> None:
        """Meet the other learners. `together`: all are on this machine, and nobody else need hear of it; `shared`: some are on
        one GPU, which nccl does not do."""
        interface = "lo" if together else interface_of(self.where())
        if interface is not None:  # or else they would take what the machine's name stands for, often the loopback's
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        kind = "nccl" if self.learner.device.type == "cuda" and not shared else "gloo"
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
        with parting():
            dist.init_process_group(kind, init_method=meeting, rank=self.rank, world_size=learners, **options)
            dist.barrier()
        if together and self.rank == 0:
            shutil.rmtree(Path(meeting.removeprefix("file://")).parent, ignore_errors=True)

    def load(self, state: Any, counters: dict[str, int]) -> None:
        self.learner.load(unpack_state(state), counters)

    def weights(self) -> Any:
        """A reference to the weights as they are."""
        import ray

        return ray.put(arrays_of(list(self.learner.agent.state_dict(keep_vars=True).values())))

    def fetch(self, number: int, reference: list[Any]) -> None:
        """Bring a rollout here, while the last ones are learnt from."""
        self.held[number] = unpack(get(reference[0]))

    def forget(self, number: int) -> None:
        self.held.pop(number, None)

    def learn(self, numbers: list[int]) -> Lesson:
        waited = time.monotonic() - self.since
        torch.set_num_threads(1)
        learner = self.learner
        try:
            metrics = learner.learn([self.held.pop(number) for number in numbers])
        except Exception as error:
            if (own := plugins.blame(error)) is not None:  # known here, but not where it is told
                raise RunError(own) from error
            raise
        statistics = {}
        if learner.adaptive is not None:
            statistics = {name: getattr(learner.adaptive, name).cpu().numpy() for name in ("mu", "nu", "sigma")}
        weights = [self.weights()] if self.rank == 0 else []
        self.since = time.monotonic()
        return Lesson(metrics, learner.counters(), learner.skipped_in_a_row, statistics, waited, weights)

    def save(self) -> tuple[Any, dict[str, int]]:
        return pack_state(self.learner.save()), self.learner.counters()


def _sum_of_all(own: Gradient) -> Gradient:
    """The sum of what all learners found, the same bits for each of them."""
    device = own.parameters[0].device
    numbers = [*own.sums.values(), torch.tensor(float(own.decisions), device=device)]
    flat = torch.cat([*(g.flatten() for g in own.parameters), *(n.detach().float().reshape(1) for n in numbers)])
    with parting():
        dist.all_reduce(flat)
    sizes = [*(g.numel() for g in own.parameters), *[1] * len(numbers)]
    parts = flat.split(sizes)
    count = len(own.parameters)
    parameters = tuple(part.view_as(g) for part, g in zip(parts[:count], own.parameters, strict=True))
    sums = {name: part[0] for name, part in zip(own.sums, parts[count:], strict=False)}
    moments = own.moments
    if moments is not None:
        moments = moments.clone()
        with parting():
            dist.all_reduce(moments)
    return Gradient(parameters, sums, moments, round(float(parts[-1][0])))


# --- deciding in one place ---


@dataclass
class Question:
    wanted: int  # version of the weights to decide with, at least
    inputs: Any
    state: list[np.ndarray]
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: BaseException | None = None


class Oracle:
    """Decides for all players: whatever they ask while it thinks, it thinks about next, in one batch."""

    def prepare(self, bundle: Bundle, gpu: bool) -> None:
        torch.set_num_threads(1)
        config = bundle.config()
        self.device = choose_device(config.training.device) if gpu else CPU
        self.agent = config.make_agent(bundle.interface).to(self.device)
        self.precision, self.version, self.newest = config.training.precision, -1, (-1, list[np.ndarray]())
        self.questions: list[Question] = []
        self.asked = threading.Condition()
        threading.Thread(target=self._answer_all, daemon=True).start()

    def take(self, version: int, weights: list[np.ndarray]) -> None:
        with self.asked:
            if version > self.newest[0]:  # they may come in any order
                self.newest = version, weights
            self.asked.notify()

    def think(self, wanted: int, inputs: Any, state: list[np.ndarray]) -> Any:
        question = Question(wanted, inputs, state)
        with self.asked:
            self.questions.append(question)
            self.asked.notify()
        question.answered.wait()
        if question.error is not None:
            raise question.error
        return question.answer

    def _answer_all(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self.asked:
                self.asked.wait_for(lambda: any(q.wanted <= self.newest[0] for q in self.questions))
                together = [q for q in self.questions if q.wanted <= self.newest[0]]
                self.questions = [q for q in self.questions if q.wanted > self.newest[0]]
                newest = self.newest
            try:
                self._answer(together, newest)
            except BaseException as error:
                for question in together:
                    question.error = error
            for question in together:
                question.answered.set()

    @torch.no_grad()
    def _answer(self, questions: list[Question], newest: tuple[int, list[np.ndarray]]) -> None:
        version, weights = newest
        if version != self.version:
            moved = tuple(tensor.to(self.device) for tensor in tensors_of(weights))
            Snapshot(version, moved).put_into(self.agent)
            self.version = version
        inputs = _join_inputs([question.inputs for question in questions]).to(self.device)
        columns = zip(*(question.state for question in questions), strict=True)
        state = tuple(torch.cat(tensors_of(column)).to(self.device) for column in columns)
        with autocast(self.device, self.precision):
            output, after = self.agent(inputs, state)
        sizes = [question.inputs["done"].shape[1] for question in questions]
        logits, values = (x.cpu().split(sizes, dim=1) for x in (output.distribution.logits, output.value))
        states = [s.cpu().split(sizes) for s in after]
        for k, question in enumerate(questions):
            mine = [s[k].numpy() for s in states]
            question.answer = self.version, logits[k].numpy(), values[k].numpy(), mine


class Asking:
    """An agent whose decisions are made by the oracle; to its actor it is an agent like any other."""

    def __init__(self, like: Agent, oracle: Any):
        self.like, self.oracle = like, oracle
        self.wanted = 0  # version of the weights to decide with, at least
        self.actor: Actor | None = None

    def initial_state(self, batch_size: int) -> State:
        return self.like.initial_state(batch_size)

    def __call__(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        question = {
            "observation": {kind: x.numpy() for kind, x in inputs.observation.items()},
            **{name: getattr(inputs, name).numpy() for name in ("reward", "done", "last_action", "task")},
        }
        version, logits, value, after = get(self.oracle.think.remote(self.wanted, question, arrays_of(state)))
        assert self.actor is not None
        self.actor.version = version
        output = Output(Categorical(torch.tensor(logits)), torch.tensor(value))
        return output, tuple(torch.tensor(s) for s in after)


def _join_inputs(asked: list[dict[str, Any]]) -> Inputs:
    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.cat(tensors_of(arrays), dim=1)

    observation = {kind: joined([a["observation"][kind] for a in asked]) for kind in asked[0]["observation"]}
    rest = (joined([a[name] for a in asked]) for name in ("reward", "done", "last_action", "task"))
    return Inputs(observation, *rest)
