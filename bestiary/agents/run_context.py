"""RunContext: information about a run from which a component derives the options that the user did not set.

A component class may define

    @classmethod
    def derive_options(cls, options, context: RunContext) -> options

This method returns a copy of `options`. In the copy, each option that the user did not set (None or "auto") has a value
that suits the run.
"""

from dataclasses import dataclass, field

from bestiary.envs.vector_env import EnvInterface


@dataclass(frozen=True)
class RunContext:
    """The properties of a run that are known before its components (agent, algorithm, ...) are built."""

    interface: EnvInterface  # observations, actions and tasks of the environments
    critic: str | None = None  # name of the critic; None if the agent has no exchangeable critic
    reward_scale: float | None = None  # factor that maps typical values of --reward to [-1,1]; None without --reward
    pool_size: int = 1  # number of environments per vector environment; if not `equal_pools`, the smallest number
    equal_pools: bool = True  # whether all vector environments have the same number of environments
    total_pools: int = 1  # total number of vector environments, over all actors
    num_envs_given: bool = False  # whether the user chose the number of environments
    learners: int = 1  # number of learners; each learner processes a part of each batch
    sequence_length: int = 0  # steps per training sequence; 0 (unknown) while the algorithm derives its options
    given: frozenset[str] = field(default_factory=frozenset)  # names of the component's options that the user set

    @property
    def num_tasks(self) -> int:
        return len(self.interface.tasks)
