"""From batches to the numbers, figures and tables of the routing analyses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modules.openmoe import analysis, figures
from modules.openmoe.config import ModelConfig
from modules.openmoe.objective import causal
from modules.openmoe.router import Routing
from orchestra.figures import save_figure, save_table

if TYPE_CHECKING:
    from modules.openmoe.module import OpenMoE


class Collectors:
    """One `RoutingCollector` for each MoE layer."""

    def __init__(self, config: ModelConfig) -> None:
        layers = sum(config.is_moe_layer(i) for i in range(config.num_layers)) if config.layout == "moe" else 0
        self.layers = [analysis.RoutingCollector(config.num_experts, config.vocab_size) for _ in range(layers)]

    def update(self, batch: dict[str, Tensor], routings: list[Routing]) -> None:
        for collector, routing in zip(self.layers, routings, strict=True):
            expert, kept = routing.by_sequence(*batch["input_ids"].shape)
            collector.update(batch["input_ids"], batch["mask"], batch["domain"], expert, kept)


@torch.no_grad()
def probe(model: OpenMoE, blocks: int) -> Tensor | None:
    """n(v, e) of the first `blocks` validation blocks: `[MoE layers, V, E]` int32; None for a dense model."""
    collectors = Collectors(model.config.model)
    if not collectors.layers:
        return None
    model.decoder.eval()
    left = blocks
    for raw in model.trainer.datamodule.val_dataloader():  # type: ignore[attr-defined]
        made = causal(raw["tokens"][:left], raw["length"][:left])
        batch = {name: value.to(model.device) for name, value in vars(made).items()}
        batch["domain"] = raw["domain"][:left].to(model.device)
        collectors.update(batch, model.decoder(batch["input_ids"], mask=batch["mask"]).routings)
        left -= len(batch["input_ids"])
        if left <= 0:
            break
    model.decoder.train()
    records = [collector.record() for collector in collectors.layers]
    tables = [analysis.group_counts(r.token, r.expert, r.vocab, r.num_experts) for r in records]
    return torch.stack([torch.from_numpy(table) for table in tables]).to(torch.int32)


def report(model: OpenMoE, collectors: Collectors) -> dict[str, float]:
    """Numbers of the chosen layer; its figures and tables go to the run's directory and to MLflow."""
    if not collectors.layers:
        return {}
    asked = model.config.analysis
    layer = min(asked.layer if asked.layer is not None else 2, len(collectors.layers) - 1)
    record = collectors.layers[layer].record()
    data = model.trainer.datamodule  # type: ignore[attr-defined]
    numbers = analysis.analyse(
        record, domains=data.domains, languages=data.languages, min_occurrences=asked.min_occurrences
    )
    tokenizer = data.tokenizer

    def label(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False)) or str(tokenizer.id_to_token(token))

    save_figure(model, "routing/experts_by_domain", figures.expert_shares(record, data.domains))
    save_figure(
        model, "routing/specialisation_by_token", figures.specialisation_by_token(record, asked.min_occurrences, label)
    )
    save_figure(model, "routing/what_decides_the_expert", figures.information(numbers))
    save_figure(
        model,
        "routing/drop_towards_the_end",
        figures.drops_by_position(record, data.domains, data.trained, data.languages),
    )
    counts = analysis.group_counts(record.token, record.expert, record.vocab, record.num_experts)
    save_table(model, "routing/favourite_tokens", figures.favourite_tokens(counts, label))
    return numbers | _early_learning(model, layer)


def _early_learning(model: OpenMoE, layer: int) -> dict[str, float]:
    """Agreement of each stored token-to-expert table with the last one."""
    tables = {float(share): table[layer].double().numpy() for share, table in model.routing_tables.items()}
    if len(tables) < 2:
        return {}
    config = model.config
    final = tables[max(tables)]
    used = analysis.tokens_used(final, config.model.top_k, config.analysis.min_occurrences)
    found = {share: analysis.routing_agreement(table, final, used) for share, table in sorted(tables.items())}
    top1, overlap = [pair[0] for pair in found.values()], [pair[1] for pair in found.values()]
    save_figure(model, "routing/early_learning", figures.early_learning(list(found), top1, overlap))
    numbers: dict[str, float] = {}
    for share, (same, shared) in found.items():
        if share < max(found):
            numbers |= {f"top1_agreement_{share:g}": same, f"routing_overlap_{share:g}": shared}
    return numbers
