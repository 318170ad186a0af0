"""How much capacity a corpus needs: the factor at which few tokens are dropped at the end of a sequence.

    python -m modules.openmoe.drop_forecast <checkpoint> <text files> [--length 128] [--target 0.01]

An arrival number does not depend on the capacity, and a (token, choice) pair is dropped when its number reaches it.
So one pass over the corpus gives the drop rate at every capacity. (Layers are looked at one by one, with nothing
dropped before them.)
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from modules.openmoe.router import Routing, arrival_numbers


def drop_rate_at(position: Tensor, capacity: int) -> Tensor:
    """Share of pairs dropped at each place of the sequence `[T]`, from arrival numbers `[G, T, k]`."""
    return (position >= capacity).double().mean((0, 2))


def capacity_needed(position: Tensor, target: float) -> int:
    """Smallest capacity at which at most `target` of the pairs in the last third of the sequence are dropped.

    Raises:
        ValueError: fewer than three tokens, or a target that is no share.
    """
    third = position.shape[1] // 3
    if third == 0:
        raise ValueError(f"a sequence of {position.shape[1]} tokens has no last third")
    if not 0 <= target < 1:
        raise ValueError(f"target={target} is not a share of at least 0 and below 1")
    late = position[:, -third:].reshape(-1).sort().values
    allowed = math.floor(target * late.numel())  # pairs that may be dropped: the ones with the highest numbers
    return int(late[late.numel() - 1 - allowed]) + 1


def factor_needed(position: Tensor, num_experts: int, target: float) -> float:
    """Capacity factor (rule `per_choice`) whose capacity is `capacity_needed`."""
    _, tokens, k = position.shape
    return capacity_needed(position, target) * num_experts / (k * tokens)


def forecast(routing: Routing, target: float) -> float:
    """`factor_needed` of one layer's routing of full sequences."""
    return factor_needed(arrival_numbers(routing.expert, routing.num_experts), routing.num_experts, target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m modules.openmoe.drop_forecast", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("files", nargs="+", type=Path, help="text files of the corpus")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--target", type=float, default=0.01, help="share of pairs dropped in the last third")
    arguments = parser.parse_args()
    from modules.openmoe.module import OpenMoE

    model = OpenMoE.load_from_checkpoint(arguments.checkpoint, map_location="cpu", weights_only=True).eval()
    assert model.tokenizer is not None
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in arguments.files)
    ids = torch.tensor(model.tokenizer.encode(text, add_special_tokens=False).ids)
    whole = len(ids) // arguments.length
    if not whole:
        parser.error(f"the corpus has {len(ids)} tokens, fewer than one sequence of {arguments.length}")
    sequences = ids[: whole * arguments.length].view(whole, arguments.length)
    with torch.inference_mode():
        batches = [model.decoder(batch, dropless=True).routings for batch in sequences.split(32)]
    for layer, parts in enumerate(zip(*batches, strict=True)):
        experts = parts[0].num_experts
        position = torch.cat([arrival_numbers(part.expert, experts) for part in parts])
        factor = factor_needed(position, experts, arguments.target)
        print(f"MoE layer {layer}: capacity factor {factor:.2f} drops at most {arguments.target:.1%} in the last third")


if __name__ == "__main__":
    main()
