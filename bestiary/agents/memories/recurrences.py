"""GRU and LSTM through time, with resets: as PyTorch defines the two cells, with a backward pass of their own.

PyTorch's layers know no resets inside a sequence, and on a CPU record a dozen operations for autograd at each step. Here a
sequence is one operation for autograd; what does not depend on the step before is done for all steps at once by the caller
(the input's part of the gates) or at the end (the gradient of the weights).

Shapes: gates [T,B,G*H] from the input, resets bool [T,B,1] where an episode begins, h and c [B,H]. What a state was before a
reset does not matter, even where it was not finite.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GRUSequence(torch.autograd.Function):
    """r, z = sigmoid(gates + U h + b), n = tanh(gates + r (U h + b)), h' = (1 - z) n + z h. Returns every h' [T,B,H]."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, resets: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size, weight_t = h.shape[1], weight.t()
        befores, gated, news, froms, outputs = [], [], [], [], []
        for gate, reset in zip(gates.unbind(), resets.unbind(), strict=True):
            h = h.masked_fill(reset, 0)
            from_h = torch.addmm(bias, h, weight_t)
            rz = (gate[:, : 2 * size] + from_h[:, : 2 * size]).sigmoid_()
            n = torch.addcmul(gate[:, 2 * size :], rz[:, :size], from_h[:, 2 * size :]).tanh_()
            befores.append(h)
            gated.append(rz)
            news.append(n)
            froms.append(from_h)
            h = torch.lerp(n, h, rz[:, size:])
            outputs.append(h)
        ctx.save_for_backward(resets, weight, *befores, *gated, *news, *froms)
        return torch.stack(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        resets, weight, *saved = ctx.saved_tensors
        length = len(grad)
        befores, gated, news, froms = (saved[k * length : (k + 1) * length] for k in range(4))
        size = grad.shape[2]
        d_gates, d_froms = grad.new_empty(*grad.shape[:2], 3 * size), grad.new_empty(*grad.shape[:2], 3 * size)
        d_h = torch.zeros_like(grad[0])
        for t in reversed(range(length)):
            h, rz, n = befores[t], gated[t], news[t]
            z = rz[:, size:]
            d_h = d_h + grad[t]
            d_z = d_h * (h - n)
            d_n = torch.addcmul(d_h, d_h, z, value=-1) * torch.addcmul(torch.ones_like(n), n, n, value=-1)
            d_gate, d_from = d_gates[t], d_froms[t]
            d_rz = torch.cat([d_n * froms[t][:, 2 * size :], d_z], dim=1)
            d_gate[:, : 2 * size] = d_rz * torch.addcmul(rz, rz, rz, value=-1)
            d_gate[:, 2 * size :] = d_n
            d_from[:, : 2 * size] = d_gate[:, : 2 * size]
            torch.mul(d_n, rz[:, :size], out=d_from[:, 2 * size :])
            d_h = torch.addmm(d_h * z, d_from, weight).masked_fill_(resets[t], 0)
        flat = d_froms.flatten(0, 1)
        d_weight = flat.t() @ torch.cat(befores)
        return d_gates, None, d_h, d_weight, flat.sum(0)


class LSTMSequence(torch.autograd.Function):
    """i, f, o = sigmoid, g = tanh of (gates + U h), c' = f c + i g, h' = o tanh(c'). Returns every h' [T,B,H], the last c'."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, resets: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        size, weight_t = h.shape[1], weight.t()
        befores, cells, acts, outputs = [], [c.masked_fill(resets[0], 0)], [], []
        for t, gate in enumerate(gates.unbind()):
            h = h.masked_fill(resets[t], 0)
            a = torch.addmm(gate, h, weight_t)
            a[:, : 2 * size].sigmoid_()
            a[:, 2 * size : 3 * size].tanh_()
            a[:, 3 * size :].sigmoid_()
            i, f, g, o = a.chunk(4, dim=1)
            befores.append(h)
            acts.append(a)
            c = torch.addcmul(f * cells[t], i, g)
            h = o * c.tanh()
            outputs.append(h)
            cells.append(c.masked_fill(resets[t + 1], 0) if t + 1 < len(resets) else c)
        ctx.save_for_backward(resets, weight, *befores, *cells, *acts)
        return torch.stack(outputs), c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        resets, weight, *saved = ctx.saved_tensors
        length, size = len(grad), grad.shape[2]
        befores, cells, acts = saved[:length], saved[length : 2 * length + 1], saved[2 * length + 1 :]
        d_gates = grad.new_empty(*grad.shape[:2], 4 * size)
        d_h, d_c = torch.zeros_like(grad[0]), grad_c
        for t in reversed(range(length)):
            i, f, g, o = acts[t].chunk(4, dim=1)
            tanh = torch.addcmul(i * g, f, cells[t]).tanh()
            d_h = d_h + grad[t]
            d_c = torch.addcmul(d_c, d_h * o, torch.addcmul(torch.ones_like(tanh), tanh, tanh, value=-1))
            d_i, d_f, d_g, d_o = d_gates[t].chunk(4, dim=1)
            torch.mul(d_c * g, torch.addcmul(i, i, i, value=-1), out=d_i)
            torch.mul(d_c * cells[t], torch.addcmul(f, f, f, value=-1), out=d_f)
            torch.mul(d_c * i, torch.addcmul(torch.ones_like(g), g, g, value=-1), out=d_g)
            torch.mul(d_h * tanh, torch.addcmul(o, o, o, value=-1), out=d_o)
            d_c = (d_c * f).masked_fill_(resets[t], 0)
            d_h = (d_gates[t] @ weight).masked_fill_(resets[t], 0)
        d_weight = d_gates.flatten(0, 1).t() @ torch.cat(befores)
        return d_gates, None, d_h, d_c, d_weight
