"""Options that actor-critic algorithms share."""

from dataclasses import dataclass, replace
from typing import Self

from bestiary.agents.run_context import RunContext
from bestiary.algorithms.lr_schedules import SCHEDULES
from bestiary.algorithms.reward_transform import REWARD_CLIPPING
from bestiary.utils.errors import UserError
from bestiary.utils.options import option


@dataclass(frozen=True)
class ActorCriticOptions:
    """Options that actor-critic algorithms share. Subclasses may change the defaults."""

    lr: float = option(
        5e-4, "initial learning rate (with --algo.lr-schedule warmup: the highest rate)", above=0, unprefixed=True
    )
    lr_schedule: str = option(
        "linear",
        "how the learning rate changes during the run (linear: falls to 0; warmup: rises for 10 % of the run, then "
        "falls to 0; halving: halved after each fifth of the run; staggered: falls in stages from half of the initial "
        "rate to 0)",
        choices=tuple(SCHEDULES),
    )
    lr_schedule_steps: int | None = option(
        None,
        "number of steps at which the schedule of the learning rate ends; it may be larger than --steps (default: the "
        "steps of the run)",
        low=1,
    )
    discount: float = option(0.99, "discount factor gamma", low=0, high=1)
    lam: float = option(
        0.95, "lambda of the method that computes value targets and advantages (V-trace or GAE)", low=0, high=1
    )
    entropy_coef: float = option(0.01, "coefficient of the entropy bonus", low=0)
    value_coef: float = option(0.5, "coefficient of the value loss", low=0)
    reward_clipping: str = option(
        "auto",
        "how rewards are clipped before learning (abs_one: to [-1,1]; soft_asymmetric: 5 tanh(r/5), times 0.3 if "
        "negative; return_std: divided by the running standard deviation of the discounted returns, then clipped to "
        "[-10,10]; auto: abs_one, or none with --critic popart)",
        choices=REWARD_CLIPPING,
    )
    reward_scale: float | None = option(
        None,
        "factor by which rewards are multiplied before clipping; cannot be combined with --algo.reward-clipping "
        "return_std (default: 1; with --reward, a factor that scales typical rewards to [-1,1])",
        above=0,
    )
    eps: float = option(
        1e-5,
        "epsilon of the optimizer, added to the square root of the mean squared gradient (rmsprop_tf: added to the "
        "mean squared gradient)",
        above=0,
    )
    max_grad_norm: float = option(40.0, "maximum norm of the gradient; larger gradients are scaled down", above=0)

    def derive_rewards(self, context: RunContext) -> Self:
        """Return the options. Set reward clipping and reward scale if the user did not set them.

        By default, rewards are clipped to [-1, 1]. With PopArt they are not clipped, because PopArt normalises the
        value targets. If rewards are clipped and the user chose a training reward (`--reward`), the reward scale maps
        typical rewards to [-1, 1], so that clipping does not change them. Rewards that are normalised (return_std) have
        no reward scale, because the division by the standard deviation would cancel it.

        Raises:
            UserError: the user set a reward scale for rewards that are normalised.
        """
        clipping, scale = self.reward_clipping, self.reward_scale
        if clipping == "auto":
            clipping = "none" if context.critic == "popart" else "abs_one"
        if clipping == "return_std":
            if "reward_scale" in context.given and scale is not None:
                raise UserError(
                    f"--algo.reward-scale {scale:g}: has no effect with --algo.reward-clipping return_std, which "
                    "divides by the scale again; remove it"
                )
            scale = None
        elif scale is None and clipping != "none":
            scale = context.reward_scale
        return replace(self, reward_clipping=clipping, reward_scale=scale)
