"""Optimizers: PyTorch's Adam and RMSprop, changed so that they do not import a compiler, and TensorFlow's RMSProp.

PyTorch wraps the methods of its optimizers in functions that hide the methods from `torch.compile`. The first call of
such a wrapper imports the compiler. In a short training run, this import took 2 of 5 s of CPU time. Bestiary does not
compile optimizers, so the classes in this module have the original methods, without wrappers.
"""

import inspect
from typing import Any

import torch
from torch import nn

WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # wrapped methods except `step`


def unwrap_methods(optimizer: type[torch.optim.Optimizer]) -> type[Any]:
    """Return a subclass of `optimizer` that has the original methods, without wrappers for `torch.compile`."""
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in WRAPPED_METHODS}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


class _RMSpropTF(torch.optim.Optimizer):
    """RMSProp as in TensorFlow 1 (`tf.train.RMSPropOptimizer`), which Espeholt et al. (2018) used for IMPALA.

    For each parameter w with gradient g, a step computes

        s = alpha s + (1 - alpha) g^2
        m = momentum m + lr g / sqrt(s + eps)
        w = w - m

    s starts at 1, m starts at 0. In PyTorch's RMSprop, s starts at 0, eps is added to the square root, and the learning
    rate is not part of m.
    """

    def __init__(self, params: Any, lr: float, alpha: float = 0.99, eps: float = 1e-10, momentum: float = 0.0):
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. `closure` must be None."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["square_avg"] = torch.ones_like(parameter)
                    if group["momentum"]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in parameters]
            squares = [self.state[parameter]["square_avg"] for parameter in parameters]
            torch._foreach_mul_(squares, group["alpha"])
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            if not group["momentum"]:
                torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])
                continue
            moments = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_addcdiv_(moments, gradients, roots, group["lr"])
            torch._foreach_sub_(parameters, moments)


Adam = unwrap_methods(torch.optim.Adam)
RMSprop = unwrap_methods(torch.optim.RMSprop)
RMSpropTF = unwrap_methods(_RMSpropTF)


def make_adam(parameters: list[nn.Parameter], lr: float, eps: float) -> torch.optim.Optimizer:
    """Return an Adam optimizer. On CPUs and CUDA GPUs, use the fused version, which is three times as fast."""
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return Adam(parameters, lr=lr, eps=eps, fused=fused)
