"""Forward and backward of one MoE layer against its peers, on the same shapes and the same weights, in one run.

    python benchmarks/moe_layer.py [--threads 2] [--dtype float32] [--device cpu] [--rounds 7]

Peers: `deepspeed.moe.layer.MoE` (made deterministic), the Mixtral block of `transformers` with its fastest expert
implementation here, and a dense SwiGLU feed-forward of the same active FLOPs. Nothing is dropped by any of them. The
contestants take turns within every round, so that a slow moment of the machine hits all of them; the figure is the
median over rounds. Outputs of the layers that share weights are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.openmoe.config import ModelConfig
from modules.openmoe.moe import MoELayer
from orchestra.memory import keep_freed_memory

# Tokens, width, expert width, experts, choices. The fourth and fifth are the fine-grained ones.
SHAPES = [
    (1024, 256, 512, 8, 2),
    (4096, 256, 512, 16, 2),
    (2048, 512, 1024, 32, 2),
    (4096, 128, 128, 64, 2),
    (4096, 256, 128, 64, 8),
    (512, 768, 3072, 16, 2),
]


class Dense(nn.Module):
    """SwiGLU of width k * d_ff: the FLOPs that a token meets in the MoE layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class SwiGLUExpert(nn.Module):
    """One expert for DeepSpeed's layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def ours(width: int, hidden: int, experts: int, k: int) -> MoELayer:
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=width, d_ff=hidden, num_experts=experts, top_k=k, capacity_factor=None, eval_capacity_factor=None
    )
    layer = MoELayer(config)
    with torch.no_grad():
        layer.router.weight.normal_(0.0, 0.02)
        layer.experts.w_in.normal_(0.0, width**-0.5)
        layer.experts.w_out.normal_(0.0, hidden**-0.5)
    return layer


def mixtral(layer: MoELayer, implementation: str) -> nn.Module:
    """The Mixtral block with the same weights; it renormalises probabilities, which costs next to nothing."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, _, width = layer.experts.w_in.shape
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=layer.experts.w_out.shape[1],
        num_local_experts=experts,
        num_experts_per_tok=layer.config.top_k,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(layer.experts.w_in)
        block.experts.down_proj.copy_(layer.experts.w_out.transpose(1, 2))
    return block


def deepspeed_layer(layer: MoELayer) -> nn.Module:
    """DeepSpeed's layer with the same weights: no sampling, no random selection, room for every token."""
    from deepspeed.moe.layer import MoE

    experts, _, width = layer.experts.w_in.shape
    k = layer.config.top_k
    peer = MoE(
        hidden_size=width,
        expert=SwiGLUExpert(width, layer.experts.w_out.shape[1]),
        num_experts=experts,
        ep_size=1,
        k=k,
        # Capacity must be given: as many slots as the fullest expert needs, found below, is the least that drops none.
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    peer.set_deepspeed_parallelism()
    with torch.no_grad():
        peer.deepspeed_moe.gate.wg.weight.copy_(layer.router.weight)
        for expert, first, second in zip(
            peer.deepspeed_moe.experts.deepspeed_experts, layer.experts.w_in, layer.experts.w_out, strict=True
        ):
            expert.gate_up.weight.copy_(first)
            expert.down.weight.copy_(second.t())
    return peer


def step(module: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).backward(grad)
        if x.is_cuda:
            torch.cuda.synchronize()

    return run


def agreement(layer: MoELayer, peer: nn.Module, x: Tensor) -> float:
    """Largest relative difference of the outputs, with our weights renormalised as the peers do."""
    renormalised = MoELayer(layer.config.model_copy(update={"renormalize": True})).to(x.device, x.dtype)
    renormalised.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected, out = renormalised(x)[0], peer(x)
        out = out[0] if isinstance(out, tuple) else out
        return float((out - expected).abs().max() / expected.abs().max())


def measure(shape: tuple[int, int, int, int, int], arguments: argparse.Namespace) -> dict[str, Any]:
    tokens, width, hidden, experts, k = shape
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    layer = ours(width, hidden, experts, k).to(device, dtype)
    x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    contestants: dict[str, nn.Module] = {"ours": layer, "dense": Dense(width, k * hidden).to(device, dtype)}
    for name in arguments.mixtral:
        contestants[f"mixtral {name}"] = mixtral(layer, name).to(device, dtype)
    contestants["deepspeed"] = deepspeed_layer(layer).to(device, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for name, peer in contestants.items():
        if name not in ("ours", "dense"):
            difference = agreement(layer, peer, x)
            assert difference < tolerance, f"{name} differs by {difference:.1e} on {shape}"
    runs = {name: step(module, x, grad) for name, module in contestants.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) * 1e3)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {"shape": shape, "milliseconds": median, "all": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mixtral", nargs="+", default=["eager", "grouped_mm"], help="expert implementations to run")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="indices of shapes")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/moe_layer.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every run of train.py does
    import deepspeed

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"})
    os.environ["LOCAL_RANK"] = "0"
    deepspeed.init_distributed("gloo" if arguments.device == "cpu" else "nccl", verbose=False)
    print(
        f"{os.cpu_count()} cores, {arguments.threads} threads, {arguments.device}, {arguments.dtype}, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; milliseconds, forward + backward, median"
    )
    columns = f"{'T, d, ff, E, k':<26}{'ours':>9}{'dense':>9}{'mixtral':>9}{'deepspeed':>11}"
    print(columns + "  ours/dense  mixtral/ours  deepspeed/ours")
    results = []
    for index in arguments.shapes:
        result = measure(SHAPES[index], arguments)
        results.append(result)
        ms = result["milliseconds"]
        best = min(value for name, value in ms.items() if name.startswith("mixtral"))
        print(
            f"{result['shape']!s:<26}{ms['ours']:>9.1f}{ms['dense']:>9.1f}{best:>9.1f}{ms['deepspeed']:>11.1f}"
            f"{ms['ours'] / ms['dense']:>12.2f}{best / ms['ours']:>14.2f}{ms['deepspeed'] / ms['ours']:>16.2f}",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, **vars(arguments), "output": None}
    arguments.output.write_text(json.dumps({"machine": facts, "results": results}, indent=2))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
