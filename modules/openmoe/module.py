"""OpenMoE under Lightning: steps, logging, optimiser, and the routing analyses as test outputs."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torchmetrics import MeanMetric

from modules.openmoe import losses, routing_analysis
from modules.openmoe.config import OpenMoEConfig
from modules.openmoe.counting import model_card
from modules.openmoe.generation import generate
from modules.openmoe.objective import MIXTURE, UL2, Objective, causal
from modules.openmoe.optim import build_optimizer, build_schedule
from modules.openmoe.router import Router
from modules.openmoe.transformer import Decoder, DecoderOutput


class OpenMoE(pl.LightningModule):
    """Trains a decoder with the losses of the paper and reports what its router has learnt.

    Settings: `modules.openmoe.config.OpenMoEConfig`. The data give blocks of tokens (see `datamodules.text`); the
    objective makes examples of them on the CPU, before they go to the device.

    Logs `train/loss`, `train/nll`, `train/accuracy`, `train/load_balance`, `train/router_z`, `train/z`,
    `train/drop_rate` and `train/expert_share/<expert>` (of all choices, over all layers and processes); `val/nll` and
    `test/nll` in nats per token over the domains that are trained on, and `.../nll_<domain>` for each; and at test time
    the numbers of `modules.openmoe.analysis`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = OpenMoEConfig(**settings)
        self.save_hyperparameters(self.config.model_dump(mode="json"))
        self.decoder = Decoder(self.config.model, self.config.activation_checkpointing)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        self.tokens_seen: Tensor
        self.routing_tables: dict[str, Tensor] = {}  # share of training done -> [MoE layers, V, E] choices counted
        self.tokenizer: Tokenizer | None = None
        self.objective: Objective | None = None
        self._nll: dict[str, MeanMetric] = {}
        self._collectors: routing_analysis.Collectors | None = None

    # --- data ---

    def setup(self, stage: str) -> None:
        """Fit the objective to the data.

        Raises:
            ValueError: the data have more token ids than the embedding has rows.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.vocab_size > self.config.model.vocab_size:
            raise ValueError(
                f"the data have {data.vocab_size} token ids but module.model.vocab_size={self.config.model.vocab_size}"
            )
        self.tokenizer = data.tokenizer
        self.objective = Objective(self.config.objective, self._ul2(data), seed=data.config.seed)
        self._nll = {name: MeanMetric() for name in ("all", *data.domains)}

    def _ul2(self, data: Any) -> UL2 | None:
        asked = self.config.objective
        if asked.pretraining != "ul2":
            return None
        block = data.config.block_length
        return UL2(
            asked.inputs_length or block // 2,
            asked.targets_length or block // 2,
            sentinels=data.sentinel_ids,
            prompts={d.prompt: data.encode(d.prompt) for d in MIXTURE},
            eos_id=data.eos_id,
            pad_id=data.pad_id,
        )

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Blocks of tokens become inputs and labels."""
        if self.trainer.training:
            assert self.objective is not None
            made = self.objective(
                batch["tokens"],
                batch["length"],
                step=self.global_step,
                batch=self.trainer.fit_loop.epoch_loop.batch_progress.total.ready,
                tokens_seen=int(self.tokens_seen),
                rank=self.global_rank,
            )
        else:
            made = causal(batch["tokens"], batch["length"])
        return {**vars(made), "domain": batch["domain"]}

    def forward(self, batch: dict[str, Tensor]) -> DecoderOutput:
        output: DecoderOutput = self.decoder(
            batch["input_ids"], mask=batch["mask"], prefix_length=batch["prefix_length"]
        )
        return output

    # --- training ---

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self(batch)
        totals = losses.totals(out.logits, batch["labels"], batch["mask"], out.routings)
        nll, z = losses.cross_entropy_and_z(out.logits, batch["labels"], totals.per_process(totals.predicted))
        balance = losses.mean_over_layers(
            [losses.load_balance_loss(r, self.config.model.balance_scope) for r in out.routings], nll
        )
        tokens = totals.per_process(totals.tokens)
        router_z = losses.mean_over_layers([losses.router_z_loss(r, tokens) for r in out.routings], nll)
        weight = self.config.loss
        loss = nll + weight.load_balance * balance + weight.router_z * router_z + weight.z * z
        self.tokens_seen += totals.tokens.long()
        self._log_training({"loss": loss, "nll": nll, "z": z}, balance, router_z, totals)
        return loss

    def _log_training(
        self, values: dict[str, Tensor], balance: Tensor, router_z: Tensor, totals: losses.Totals
    ) -> None:
        whole = {"accuracy": totals.right / totals.predicted.clamp(min=1)}  # the same in every process
        if len(totals.chosen):
            values |= {"load_balance": balance, "router_z": router_z}
            whole["drop_rate"] = totals.drop_rate
            shares = totals.chosen / totals.chosen.sum().clamp(min=1)
            whole |= {f"expert_share/{expert}": share for expert, share in enumerate(shares.unbind())}
        self.log_dict({f"train/{name}": value.detach() for name, value in values.items()}, sync_dist=True)
        self.log_dict({f"train/{name}": value.float() for name, value in whole.items()})
        self.log("nll", values["nll"].detach(), prog_bar=True, logger=False)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Fix the router from `freeze_router_at` on: without gradients the optimiser passes over it."""
        frozen = self.config.freeze_router_at
        if frozen is not None and self.global_step >= frozen:
            for module in self.modules():
                if isinstance(module, Router):
                    module.weight.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the routing of fixed validation blocks at the shares of training that the analysis asks for."""
        total = int(self.trainer.estimated_stepping_batches)
        for share in self.config.analysis.checkpoints:
            if str(share) not in self.routing_tables and self.global_step == max(1, round(share * total)):
                table = routing_analysis.probe(self, self.config.analysis.probe_blocks)
                if table is not None:
                    self.routing_tables[str(share)] = table

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.named_parameters(), self.config.optimizer)
        schedule = build_schedule(optimizer, self.config.optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # --- evaluation ---

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_nll("val")

    def on_test_start(self) -> None:
        self._collectors = routing_analysis.Collectors(self.config.model)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self._evaluate(batch)
        assert self._collectors is not None
        self._collectors.update(batch, out.routings)

    def on_test_epoch_end(self) -> None:
        self._log_nll("test")
        assert self._collectors is not None
        numbers = routing_analysis.report(self, self._collectors)
        self.log_dict({f"test/{name}": value for name, value in numbers.items()}, sync_dist=True)

    def _evaluate(self, batch: dict[str, Tensor]) -> DecoderOutput:
        out = self(batch)
        nll = losses.token_nll(out.logits, batch["labels"])
        predicted = batch["labels"] != -100
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        names = data.domains
        for index in batch["domain"].unique().tolist():
            rows = batch["domain"] == index
            values = nll[rows][predicted[rows]]
            for name in (names[index], "all") if names[index] in data.trained else (names[index],):
                self._nll[name].to(values.device).update(values)
        return out

    def _log_nll(self, stage: str) -> None:
        for name, metric in self._nll.items():
            if metric.update_called:
                label = f"{stage}/nll" if name == "all" else f"{stage}/nll_{name}"
                self.log(label, metric.compute(), prog_bar=name == "all", sync_dist=True)
                metric.reset()

    # --- use ---

    def complete(self, prompt: str, max_new_tokens: int = 100, **options: Any) -> str:
        """Text that continues `prompt`; `options` are those of `modules.openmoe.generation.generate`.

        Raises:
            ValueError: the model has no tokenizer, because it comes neither from a checkpoint nor from training.
        """
        if self.tokenizer is None:
            raise ValueError("no tokenizer: load the model from a checkpoint of this project")
        begin, end = (int(self.tokenizer.token_to_id(name) or 0) for name in ("<s>", "</s>"))
        ids = [begin, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
        (new,) = generate(self.decoder, [ids], max_new_tokens, eos_id=end, **options)
        return str(self.tokenizer.decode(new, skip_special_tokens=True))

    def describe(self) -> str:
        """The model card."""
        return model_card(self.config.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["routing_tables"] = dict(self.routing_tables)
        if self.tokenizer is not None:
            checkpoint["tokenizer"] = self.tokenizer.to_str()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The best checkpoint is older than the end of training: keep what this process has seen since.
        self.routing_tables = checkpoint["routing_tables"] | self.routing_tables
        if self.tokenizer is None and "tokenizer" in checkpoint:
            self.tokenizer = Tokenizer.from_str(checkpoint["tokenizer"])
