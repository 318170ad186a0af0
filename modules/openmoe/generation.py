"""Text from a trained decoder, with a key-value cache.

    python -m modules.openmoe.generation <checkpoint> --prompt "In the beginning"

Generation is dropless: no expert turns a token away. With a capacity, whether an earlier token's second choice survives
depends on tokens that come after it, so no cache could give what the full forward pass gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from modules.openmoe.attention import KVCache
from modules.openmoe.transformer import Decoder


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue each prompt by at most `max_new_tokens` ids, stopping behind `eos_id`; prompts may differ in length.

    Args:
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_k: draw among the k most probable tokens only.
        top_p: draw among the smallest set of tokens whose probabilities sum to at least this.

    Raises:
        ValueError: no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError("generation needs at least one prompt, and none may be empty (begin with the begin token)")
    device = decoder.embedding.weight.device
    was_training = decoder.training
    decoder.eval()
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        mask[row, : len(prompt)] = True
    cache = KVCache(longest + max_new_tokens, torch.zeros(len(prompts), dtype=torch.int64, device=device))
    logits = decoder(ids, mask=mask, cache=cache, dropless=True).logits
    last = logits[torch.arange(len(prompts), device=device), mask.sum(1) - 1]
    new: list[list[int]] = [[] for _ in prompts]
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        token = _pick(last, temperature, top_k, top_p, generator)
        for row, (value, going) in enumerate(zip(token.tolist(), running.tolist(), strict=True)):
            if going:
                new[row].append(value)
        if eos_id is not None:
            running &= token != eos_id
        if not running.any():
            break
        last = decoder(token.unsqueeze(1), cache=cache, dropless=True).logits[:, -1]
    decoder.train(was_training)
    return new


def _pick(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p is not None:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all better tokens
        logits = torch.full_like(logits, -torch.inf).scatter(
            -1, index, ordered.masked_fill(before >= top_p, -torch.inf)
        )
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m modules.openmoe.generation", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint of this project, such as checkpoints/best.ckpt of a run")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from modules.openmoe.module import OpenMoE

    model = OpenMoE.load_from_checkpoint(arguments.checkpoint, map_location="cpu", weights_only=True)
    generator = torch.Generator().manual_seed(arguments.seed)
    text = model.complete(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        generator=generator,
    )
    print(arguments.prompt + text)


if __name__ == "__main__":
    main()
