"""E feed-forward networks computed as grouped matrix products over rows sorted by expert.

On a GPU in bfloat16 the products are `torch.nn.functional.grouped_mm`. On a CPU one product per expert with
its element-wise steps in between is faster on every shape of `benchmarks/moe_layer.py`: the rows of one expert stay in
the cache, and no intermediate of all rows has to be written and read again.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Kind = Literal["swiglu", "released"]


class Experts(nn.Module):
    """Stacked expert weights.

    `w_in` `[E, m*H, D]` holds the input matrices one below the other: gate and up (`swiglu`, m = 2) or value, gate and
    linear (`released`, m = 3: `((x value) * silu(x gate) * (x linear)) down`). `w_out` is `[E, H, D]`. Both have the
    model's width last: with few rows an expert, products that read them that way are the faster ones.
    """

    expert_stack = True  # every parameter has one expert per index of dimension 0: they can be spread over processes

    def __init__(self, num_experts: int, d_model: int, d_ff: int, kind: Kind = "swiglu") -> None:
        super().__init__()
        self.kind: Kind = kind
        inputs = 2 if kind == "swiglu" else 3
        self.w_in = nn.Parameter(torch.empty(num_experts, inputs * d_ff, d_model))
        self.w_out = nn.Parameter(torch.empty(num_experts, d_ff, d_model))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`rows` `[N, D]` sorted by expert, `counts[e]` of them for expert e -> `[N, D]`."""
        device = rows.device.type
        if torch.is_autocast_enabled(device):  # the products below are out of autocast's sight
            rows = rows.to(torch.get_autocast_dtype(device))
        w_in, w_out = self.w_in.to(rows.dtype), self.w_out.to(rows.dtype)
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return _grouped(rows, w_in, w_out, counts, self.kind)
        if self.kind == "swiglu":
            out: Tensor = _SwiGLU.apply(rows, w_in, w_out, counts)
            return out
        return _one_by_one(rows, w_in, w_out, counts, self.kind)


def gated(hidden: Tensor, kind: Kind) -> Tensor:
    """The gated activation of `hidden` `[..., m*H]` -> `[..., H]`."""
    if kind == "swiglu":
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate) * up
    value, gate, linear = hidden.chunk(3, -1)
    return value * F.silu(gate) * linear


def _grouped(rows: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int], kind: Kind) -> Tensor:
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(gated(F.grouped_mm(rows, w_in.transpose(1, 2), offs=ends), kind), w_out, offs=ends)


def _one_by_one(rows: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int], kind: Kind) -> Tensor:
    parts = zip(rows.split(counts), w_in.transpose(1, 2).unbind(), w_out.unbind(), strict=True)
    return torch.cat([gated(x @ first, kind) @ second for x, first, second in parts])


class _SwiGLU(torch.autograd.Function):
    """SwiGLU experts one after the other, writing into preallocated outputs; gradients by hand for the same reason.

    silu(gate) is kept for the backward pass instead of silu(gate) * up: a product is cheaper to repeat than an
    exponential.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
        rows, hidden = x.shape[0], w_out.shape[1]
        gate_up, silu, y = x.new_empty(rows, 2 * hidden), x.new_empty(rows, hidden), torch.empty_like(x)
        gate, up = gate_up.split(hidden, 1)
        active = x.new_empty(max(counts, default=0), hidden)
        mm, silu_out, mul = torch.mm, torch.ops.aten.silu.out, torch.mul
        for x_e, gu, g, u, s, y_e, first, second in zip(
            *(t.split(counts) for t in (x, gate_up, gate, up, silu, y)),
            *(t.unbind() for t in (w_in.transpose(1, 2), w_out)),
            strict=True,
        ):
            a = active[: len(x_e)]
            mm(x_e, first, out=gu)
            silu_out(g, out=s)
            mul(s, u, out=a)
            mm(a, second, out=y_e)
        ctx.save_for_backward(x, w_in, w_out, gate_up, silu)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w_in, w_out, gate_up, silu = ctx.saved_tensors
        counts, hidden = ctx.counts, w_out.shape[1]
        grad = grad.contiguous()
        grad_x, grad_in, grad_out = torch.empty_like(x), torch.empty_like(w_in), torch.empty_like(w_out)
        # Scratch for the largest expert, used by each in turn: it stays in the cache.
        longest = max(counts, default=0)
        scratch, scratch_gate_up = x.new_empty(longest, hidden), x.new_empty(longest, 2 * hidden)
        gate, up = gate_up.split(hidden, 1)
        mm, mul, silu_backward = torch.mm, torch.mul, torch.ops.aten.silu_backward.grad_input
        for x_e, g, u, s, out, gx, first, second, g_first, g_second in zip(
            *(t.split(counts) for t in (x, gate, up, silu, grad, grad_x)),
            *(t.unbind() for t in (w_in, w_out.transpose(1, 2), grad_in, grad_out)),
            strict=True,
        ):
            a, grad_gu = scratch[: len(x_e)], scratch_gate_up[: len(x_e)]
            grad_gate, grad_up = grad_gu.split(hidden, 1)
            mul(s, u, out=a)
            mm(a.t(), out, out=g_second)
            mm(out, second, out=a)  # now the gradient of silu(gate) * up
            mul(a, s, out=grad_up)
            a.mul_(u)
            silu_backward(a, g, grad_input=grad_gate)
            mm(grad_gu, first, out=gx)
            mm(grad_gu.t(), x_e, out=g_first)
        return grad_x, grad_in, grad_out, None
