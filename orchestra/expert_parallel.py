"""Expert parallelism, applied to a model from outside: each process of a group keeps a part of the experts.

A module that declares `expert_stack = True` promises two things: every parameter of it has one expert per index of its
first dimension, and `forward(rows, counts)` maps `[N, D]` rows sorted by expert, `counts[e]` of them for expert e, to
`[N, D]`. That is all that is needed to spread it over processes; the model does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orchestra.errors import UsageError

Compute = Callable[[Tensor, list[int]], Tensor]
Part = tuple[int, int]  # (index, number of equal parts) of every stack


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every stack of experts in `model`."""
    for name, module in model.named_modules():
        if getattr(module, "expert_stack", False):
            yield name, module


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all stacks, by their names in `model`."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, stack in stacks(model)
        for name, parameter in stack.named_parameters()
    }


def shard(model: nn.Module, group: dist.ProcessGroup, group_name: str) -> None:
    """Keep this process's experts of every stack and route rows to the owners of the others. Works in place.

    With n processes in `group`, the i-th keeps experts `[i E/n, (i+1) E/n)`. Parameters keep their names, are marked
    for DeepSpeed (`allreduce`, `group_name`) and remember the number of all experts (`total_experts`).

    Raises:
        UsageError: there are no stacks, or n does not divide their experts.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = list(stacks(model))
    if not found:
        raise UsageError(f"ep_size={size} needs a model with experts; {type(model).__name__} has none")
    for name, stack in found:
        total = next(stack.parameters()).shape[0]
        if total % size:
            raise UsageError(f"ep_size={size} does not divide the {total} experts of {name}")
        for parameter in stack.parameters():
            parameter.data = part_of([parameter.data], (rank, size))
            parameter.total_experts = total  # type: ignore[attr-defined]
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name  # type: ignore[attr-defined]
        stack.forward = Exchange(stack.forward, total, group)


def part_of(pieces: Sequence[Tensor], part: Part) -> Tensor:
    """Part `part` of the tensor whose consecutive slices along the first dimension are `pieces`, as a copy.

    Raises:
        UsageError: the parts would not be equal.
    """
    index, parts = part
    total = sum(len(piece) for piece in pieces)
    if total % parts:
        raise UsageError(f"{total} experts cannot be spread evenly over {parts} processes")
    begin, end = index * total // parts, (index + 1) * total // parts
    taken, offset = [], 0
    for piece in pieces:
        low, high = max(begin - offset, 0), min(end - offset, len(piece))
        if low < high:
            taken.append(piece[low:high])
        offset += len(piece)
    return torch.cat(taken)


class Exchange:
    """`forward` of a stack whose experts are spread over `group`: rows to the owners, their answers back.

    Every process of the group must call it equally often; how many rows each has, also none, does not matter.
    """

    def __init__(self, compute: Compute, total_experts: int, group: dist.ProcessGroup) -> None:
        self.compute, self.group = compute, group
        self.size = dist.get_world_size(group)
        self.local = total_experts // self.size

    def __call__(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`rows` `[N, D]` sorted by global expert number -> `[N, D]`."""
        device = rows.device.type
        if torch.is_autocast_enabled(device):  # the products are in this type: send no wider one
            rows = rows.to(torch.get_autocast_dtype(device))
        sent = torch.tensor(counts, device=rows.device)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=self.group)
        arriving = arriving.view(self.size, self.local)  # [source process, expert of mine]
        to, back = sent.view(self.size, self.local).sum(1).tolist(), arriving.sum(1).tolist()
        received = _AllToAll.apply(rows, to, back, self.group)
        # Rows come process by process; each expert takes its own from all of them in one product.
        expert = torch.arange(self.local, device=rows.device).repeat(self.size).repeat_interleave(arriving.reshape(-1))
        order = expert.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        answers = self.compute(_Permute.apply(received, order, place), arriving.sum(0).tolist())
        answered: Tensor = _AllToAll.apply(_Permute.apply(answers, place, order), back, to, self.group)
        return answered


class _AllToAll(torch.autograd.Function):
    """Ragged all-to-all of rows: `to[p]` rows go to process p, `back[p]` come from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (to, back), group
        return _exchange(rows, to, back, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        to, back = ctx.sizes
        return _exchange(grad, back, to, ctx.group), None, None, None


def _exchange(rows: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), back, to, group=group)
    return received


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse, which needs no scattered addition."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
