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

    `w_in` `[E, D, m*H]` holds the input matrices side by side: gate and up (`swiglu`, m = 2) or value, gate and
    linear (`released`, m = 3: `((x value) * silu(x gate) * (x linear)) down`). `w_out` is `[E, H, D]`.
    """

    def __init__(self, num_experts: int, d_model: int, d_ff: int, kind: Kind = "swiglu") -> None:
        super().__init__()
        self.kind: Kind = kind
        inputs = 2 if kind == "swiglu" else 3
        self.w_in = nn.Parameter(torch.empty(num_experts, d_model, inputs * d_ff))
        self.w_out = nn.Parameter(torch.empty(num_experts, d_ff, d_model))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`rows` `[N, D]` sorted by expert, `counts[e]` of them for expert e -> `[N, D]`."""
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
    return F.grouped_mm(gated(F.grouped_mm(rows, w_in, offs=ends), kind), w_out, offs=ends)


def _one_by_one(rows: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int], kind: Kind) -> Tensor:
    parts = zip(rows.split(counts), w_in.unbind(), w_out.unbind(), strict=True)
    return torch.cat([gated(x @ first, kind) @ second for x, first, second in parts])


class _SwiGLU(torch.autograd.Function):
    """SwiGLU experts one after the other, writing into preallocated outputs; gradients by hand for the same reason."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
        rows, hidden = x.shape[0], w_out.shape[1]
        gate_up, active, y = x.new_empty(rows, 2 * hidden), x.new_empty(rows, hidden), torch.empty_like(x)
        for x_e, gu, a, y_e, first, second in zip(
            *(t.split(counts) for t in (x, gate_up, active, y)), w_in.unbind(), w_out.unbind(), strict=True
        ):
            torch.mm(x_e, first, out=gu)
            torch.ops.aten.silu.out(gu[:, :hidden], out=a)
            a.mul_(gu[:, hidden:])
            torch.mm(a, second, out=y_e)
        ctx.save_for_backward(x, w_in, w_out, gate_up, active)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w_in, w_out, gate_up, active = ctx.saved_tensors
        counts, hidden = ctx.counts, w_out.shape[1]
        grad = grad.contiguous()
        grad_x, grad_in, grad_out = torch.empty_like(x), torch.empty_like(w_in), torch.empty_like(w_out)
        # Scratch for the largest expert, used by each in turn.
        longest = max(counts, default=0)
        scratch = [x.new_empty(longest, width) for width in (hidden, hidden, 2 * hidden)]
        for x_e, gu, a, g, gx, first, second, g_first, g_second in zip(
            *(t.split(counts) for t in (x, gate_up, active, grad, grad_x)),
            *(t.unbind() for t in (w_in, w_out, grad_in, grad_out)),
            strict=True,
        ):
            grad_active, silu, grad_gu = (t[: x_e.shape[0]] for t in scratch)
            gate, up = gu[:, :hidden], gu[:, hidden:]
            torch.mm(a.t(), g, out=g_second)
            torch.mm(g, second.t(), out=grad_active)
            torch.ops.aten.silu.out(gate, out=silu)
            torch.mul(grad_active, silu, out=grad_gu[:, hidden:])
            grad_active.mul_(up)
            torch.ops.aten.silu_backward.grad_input(grad_active, gate, grad_input=grad_gu[:, :hidden])
            torch.mm(grad_gu, first.t(), out=gx)
            torch.mm(x_e.t(), grad_gu, out=g_first)
        return grad_x, grad_in, grad_out, None
