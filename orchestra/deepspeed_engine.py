"""DeepSpeed's engine for models whose experts are spread over processes, and its states as whole parameters.

Imported only where DeepSpeed runs: the import takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from orchestra.expert_parallel import part_of

# Optimisers whose update of an element needs that element alone: ZeRO flattens parameters and cuts them anywhere.
ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.ASGD,
)


class Engine(DeepSpeedEngine):
    """Knows experts by how their parameters are marked; DeepSpeed looks for layers of its own class."""

    @property
    def has_moe_layers(self) -> bool:
        return any(is_moe_param(parameter) for parameter in self.module.parameters())

    @has_moe_layers.setter
    def has_moe_layers(self, value: bool) -> None:
        pass  # DeepSpeed's own search, which finds nothing

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all experts of all processes (DeepSpeed averages the processes' norms)."""
        squares: dict[bool, Tensor] = {}
        gradients = []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                expert = is_moe_param(parameter)
                square = parameter.grad.double().square().sum()
                squares[expert] = squares.get(expert, torch.zeros_like(square)) + square
        for name, group in groups._get_expert_parallel_group_dict().items():
            if any(getattr(parameter, "group_name", None) == name for parameter in self.module.parameters()):
                dist.all_reduce(squares[True], group=group)
        norm = torch.stack(list(squares.values())).sum().sqrt()
        factor = (self.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def build_engine(model: nn.Module, config: dict[str, Any], optimizer: Any, schedule: Any, parameters: Any) -> Engine:
    """`deepspeed.initialize`, for `Engine` and for processes that have no GPU."""
    return Engine(
        args=argparse.Namespace(),
        model=model,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=schedule,
        dist_init_required=False,
        config=config,
        config_class=DeepSpeedConfig(config),
    )


def expert_group(ep_size: int) -> tuple[dist.ProcessGroup, str]:
    """The expert-parallel group of this process (`ep_size` consecutive ranks) and its name, made when needed."""
    name = f"ep_size_{ep_size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    return groups._get_expert_parallel_group(name), name


class Groups:
    """An optimiser's parameter groups before and after experts get groups of their own.

    DeepSpeed wants experts apart from other parameters. Checkpoints hold the groups as the module made them, so that
    they fit any layout. Groups of experts come last; schedules that keep one value per group get theirs too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self.original = [list(group["params"]) for group in optimizer.param_groups]
        self.source = list(range(len(self.original)))  # of each group after the split
        for index, group in enumerate(list(optimizer.param_groups)):
            experts = [p for p in group["params"] if is_moe_param(p)]
            if not experts:
                continue
            rest = [p for p in group["params"] if not is_moe_param(p)]
            name = experts[0].group_name  # what ZeRO finds the process group by
            if not rest:
                group |= {"moe": True, "name": name}
                continue
            group["params"] = rest
            optimizer.param_groups.append({**group, "params": experts, "moe": True, "name": name})
            self.source.append(index)
        if schedule is not None:
            self._resize(vars(schedule), len(self.original), self.source)

    def rename(self, optimizer: Any) -> None:
        """Unique names, once ZeRO has been built: Lightning's LearningRateMonitor refuses two groups of one name."""
        for index, group in enumerate(optimizer.param_groups):
            if group.get("moe"):
                group["name"] = f"pg{self.source[index] + 1}-experts"

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        """Every parameter by its number in a plain optimiser's state."""
        return dict(enumerate(p for group in self.original for p in group))

    def pack(self, optimizer: Any) -> list[dict[str, Any]]:
        """`param_groups` of a plain optimiser's state."""
        packed, number = [], 0
        for members, group in zip(self.original, optimizer.param_groups, strict=False):
            kept = {key: value for key, value in group.items() if key not in ("params", "moe", "name")}
            packed.append({**kept, "params": list(range(number, number + len(members)))})
            number += len(members)
        return packed

    def unpack(self, saved: list[dict[str, Any]], optimizer: Any) -> None:
        """Take the hyper-parameters of `saved`, the `param_groups` of a plain optimiser's state."""
        for source, group in zip(self.source, optimizer.param_groups, strict=True):
            group |= {key: value for key, value in saved[source].items() if key not in ("params", "moe", "name")}

    def schedule_to_file(self, state: dict[str, Any]) -> dict[str, Any]:
        """A schedule's state with one value for each group as the module made them."""
        return self._resize(dict(state), len(self.source), range(len(self.original)))

    def schedule_from_file(self, state: dict[str, Any]) -> dict[str, Any]:
        """The reverse."""
        return self._resize(dict(state), len(self.original), self.source)

    def _resize(self, state: dict[str, Any], size: int, source: Any) -> dict[str, Any]:
        if len(self.original) == len(self.source):
            return state
        for key, value in state.items():
            if isinstance(value, list) and len(value) == size:
                state[key] = [value[index] for index in source]
        return state


# --- whole parameters and states -------------------------------------------------------------------------------------


def full_parameter(parameter: nn.Parameter) -> Tensor:
    """The parameter as the optimiser has it (float32 under mixed precision), on the CPU. Every process must ask."""
    whole = safe_get_full_fp32_param(parameter)
    return (parameter.detach() if whole is None else whole).to("cpu", copy=True)


def full_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Any]:
    """Optimiser state of `parameter` as a plain optimiser would hold it, on the CPU. Every process must ask."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return {key: _on_cpu(value) for key, value in optimizer.state.get(parameter, {}).items()}
    _link(optimizer)
    flat = _flat_of(optimizer, parameter)
    state = {}
    for key, value in optimizer.optimizer.state[flat].items():
        if isinstance(value, Tensor) and value.shape == flat.shape:
            state[key] = _on_cpu(safe_get_full_optimizer_state(parameter, key))
        else:
            state[key] = _on_cpu(value)
    return state


def load_states(engine: Engine, saved: Mapping[int, Any], plain: Mapping[int, nn.Parameter]) -> None:
    """Give the engine's optimiser the plain states in `saved`, each by its number.

    Expert states may come whole or as this process's part.
    """
    optimizer = engine.optimizer
    cut = {number: _mine(saved[number], parameter) for number, parameter in plain.items() if number in saved}
    if isinstance(optimizer, torch.optim.Optimizer):
        for number, state in cut.items():
            parameter = plain[number]
            optimizer.state[parameter] = {
                key: value.to(parameter.device if value.ndim else value.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in state.items()
            }
        return
    numbers = {id(parameter): number for number, parameter in plain.items()}
    for flat, members in _partitions(optimizer):
        with_state = [p for p in members if numbers[id(p)] in cut]
        if not with_state:
            continue
        for key, value in cut[numbers[id(with_state[0])]].items():
            if isinstance(value, Tensor):  # step counts too are counted up in place: to each its own
                value = torch.zeros_like(flat) if value.ndim else value.clone()
            optimizer.optimizer.state[flat][key] = value
    _link(optimizer)
    for number, state in cut.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                safe_set_full_optimizer_state(plain[number], value.to(plain[number].device), key)


def load_masters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the optimiser's float32 copies: the model's own may be rounded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, weights[name].to(parameter.device, torch.float32))


def _link(optimizer: Any) -> None:
    """Let DeepSpeed find each parameter's share of the flat states.

    It does so once, after the step of its first group, when the states of the others do not exist yet.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _partitions(optimizer: Any) -> list[tuple[Tensor, list[nn.Parameter]]]:
    """Each flat tensor that the inner optimiser of ZeRO steps, with the parameters that it is cut from."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True))
    return list(zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True))


def _flat_of(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    return next(flat for flat, members in _partitions(optimizer) if any(p is parameter for p in members))


def _mine(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    total = getattr(parameter, "total_experts", None)
    if total is None:
        return dict(state)
    group = groups._get_expert_parallel_group(parameter.group_name)  # type: ignore[attr-defined]
    part = dist.get_rank(group), dist.get_world_size(group)
    return {
        key: part_of([value], part) if isinstance(value, Tensor) and value.ndim and len(value) == total else value
        for key, value in state.items()
    }


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
