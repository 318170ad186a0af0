"""Tracking a run in MLflow without ever waiting for MLflow.

The training process only appends lines to `outbox.jsonl` in the run's directory. A second process
(`orchestra.delivery`) reads them and talks to the store. So a slow store cannot slow training, a store that is away
loses nothing, and a training process that is killed leaves everything it had logged behind.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from orchestra import provenance
from orchestra.config import ROOT
from orchestra.errors import UsageError
from orchestra.outbox import OUTBOX, RECORD, write_json
from orchestra.secrets import has_credentials, mask, mask_mapping

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_DEFAULT_URI = "sqlite:///mlflow.db"
_LONGEST_PARAMETER = 6000  # MLflow's limit


class TrackingUnavailable(UsageError):
    """The store did not answer when the run was to be created."""


class MLflowTracker(Logger):
    """Lightning logger that writes to an outbox and lets another process deliver it.

    Args:
        experiment: MLflow experiment; created, and marked as model training, when it does not exist.
        run_name: name of the run.
        directory: the run's directory.
        tracking_uri: the store; None takes `MLFLOW_TRACKING_URI`, else `sqlite:///mlflow.db`.
        run_id: continue this run instead of creating one.
        tags: tags of the run. Credentials in any text are masked.
        parent_run_id: the run this one is shown under.
        system_metrics_interval: seconds between samples of CPU, memory, disk, network and GPU; None for none.
        flush_interval: seconds between deliveries.
        drain_timeout: seconds that `finish` waits for a store that does not answer.
    """

    def __init__(
        self,
        *,
        experiment: str,
        run_name: str,
        directory: str | Path,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
        system_metrics_interval: float | None = 10.0,
        flush_interval: float = 1.0,
        drain_timeout: float = 30.0,
    ) -> None:
        super().__init__()
        self.experiment, self.run_name, self.directory = experiment, run_name, Path(directory)
        self.uri = tracking_uri or os.environ.get(_URI_VARIABLE) or _DEFAULT_URI
        self.drain_timeout = drain_timeout
        self._run_id, self._experiment_id = run_id, ""
        self._tags = {str(key): mask(str(value)) for key, value in (tags or {}).items()}
        self._parent_run_id = parent_run_id
        self._intervals = {"system_metrics": system_metrics_interval, "flush": flush_interval}
        self._active = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._courier: subprocess.Popen[str] | None = None
        self._outbox: Any = None
        self._last_step: dict[str, int] = {}
        self._parameters: dict[str, str] = {}
        self._finished = False

    # --- identity (Lightning's Logger) ---

    @property
    def name(self) -> str:
        return self.experiment

    @property
    def version(self) -> str:
        return self._run_id or ""

    @property
    def run_id(self) -> str:
        return self._run_id or ""

    @property
    def save_dir(self) -> str:
        return str(self.directory)

    @property
    def ui_command(self) -> str | None:
        """The command that shows an embedded store in a browser; None for a store that has a server."""
        return None if self.uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(mask(self.uri))}"

    @property
    def ui_address(self) -> str:
        """Where the run is, in the UI's view for model training (a new browser starts in the one for GenAI)."""
        server = mask(self.uri).rstrip("/") if self.uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{server}/#/experiments/{self._experiment_id}/runs/{self._run_id}?workflowType=machine_learning"

    # --- life ---

    def start(self) -> None:
        """Create or continue the run and begin to deliver.

        Raises:
            TrackingUnavailable: the store does not answer.
        """
        if not self._active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._open_outbox()
        record = {
            "tracking_uri": mask(self.uri),
            "uri_has_credentials": has_credentials(self.uri),
            "experiment": self.experiment,
            "run_name": self.run_name,
            "run_id": self._run_id,
            "parent_run_id": self._parent_run_id,
            "tags": self._tags | self._source_tags(),
            "intervals": self._intervals,
            "drain_timeout": self.drain_timeout,
            "pid": os.getpid(),
        }
        write_json(self.directory / RECORD, record)
        self._courier = subprocess.Popen(
            [sys.executable, "-m", "orchestra.delivery", str(self.directory), "--follow"],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {_URI_VARIABLE: self.uri, "PYTHONPATH": _python_path()},
            start_new_session=True,  # Ctrl-C is for the training process, which then says how the run ended
        )
        assert self._courier.stdout is not None
        answer = json.loads(self._courier.stdout.readline() or '{"error": "the delivery process ended at once"}')
        if "error" in answer:
            self._courier.wait()
            (self.directory / RECORD).unlink()
            raise TrackingUnavailable(
                f"The MLflow store {mask(self.uri)} cannot be used: {mask(answer['error'])}\n"
                f"Start it, set {_URI_VARIABLE} or logger.tracking_uri to another, or run without tracking: logger=none"
            )
        self._run_id, self._experiment_id = answer["run_id"], answer["experiment_id"]
        write_json(self.directory / RECORD, record | {"run_id": self._run_id})

    def finish(self, status: Status, error: str | None = None) -> None:
        """Record how the run ended and wait until everything is delivered, or `drain_timeout` is over."""
        if not self._active or self._finished or self._courier is None:
            return
        self._finished = True
        if error is not None:
            self.log_text(error, "traceback.txt")
        self._append({"kind": "status", "status": status})
        assert self._courier.stdin is not None
        self._courier.stdin.close()
        try:
            delivered = self._courier.wait(self.drain_timeout + 30.0) == 0
        except subprocess.TimeoutExpired:
            self._courier.kill()
            delivered = False
        self._outbox.close()
        if not delivered:
            log.warning(
                "MLflow (%s) did not take everything. It is kept in %s; deliver it later with:\n"
                "  python -m orchestra.delivery %s",
                mask(self.uri),
                self.directory / OUTBOX,
                shlex.quote(str(self.directory)),
            )

    # --- logging ---

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values at `step`. A point that an earlier start of this run has already logged is left out."""
        if not self._active or self._outbox is None:
            return
        step = int(step or 0)
        new = {
            name: float(value)
            for name, value in metrics.items()
            if name != "epoch" and step > self._last_step.get(name, -1)
        }
        if new:
            self._last_step.update(dict.fromkeys(new, step))
            self._append({"kind": "metrics", "step": step, "time": int(time.time() * 1000), "values": new})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Lightning calls this with the module's hyper-parameters; the config, which holds them, is logged instead."""

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log nested parameters under stable dotted names. One that a continued run changes becomes a tag, because
        MLflow's parameters cannot change."""
        flat = {key: _as_text(value) for key, value in _flatten(mask_mapping(dict(parameters))).items()}
        new = {key: value for key, value in flat.items() if key not in self._parameters}
        changed = {key: value for key, value in flat.items() if self._parameters.get(key, value) != value}
        self._parameters |= new
        if new:
            self._append({"kind": "parameters", "values": new})
        if changed:
            self.set_tags({f"resumed.{key}": value for key, value in changed.items()})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._append({"kind": "tags", "values": {key: mask(str(value)) for key, value in tags.items()}})

    def set_description(self, markdown: str) -> None:
        """The run's description, shown on its page."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Upload a file that stays where it is until the run has ended."""
        self._append({"kind": "artifact", "path": str(Path(path).resolve()), "folder": folder})

    def log_text(self, text: str, file: str) -> None:
        """Write `text` to `file` in the run's directory and upload it."""
        if self._active:
            target = self.directory / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(mask(text), encoding="utf-8")
            parent = str(Path(file).parent)
            self.log_artifact(target, None if parent == "." else parent)

    def log_dict(self, value: Any, file: str) -> None:
        """Write `value` as JSON, like `log_text`."""
        self.log_text(json.dumps(mask_mapping(value), indent=2, default=str), file)

    def log_dataset(self, *, name: str, digest: str, source: str, context: str, profile: Any) -> None:
        """Record the data that the run uses, as MLflow's data set."""
        record = {"name": name, "digest": digest[:36], "source": mask(source), "context": context}
        self._append({"kind": "dataset", **record, "profile": profile})

    # --- the outbox ---

    def _open_outbox(self) -> None:
        """Open for appending. What an earlier start wrote tells which points and parameters exist already."""
        path = self.directory / OUTBOX
        if path.exists():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # a kill can tear the last line
            os.truncate(path, len(whole))
            for line in whole.splitlines():
                record = json.loads(line)
                if record["kind"] == "metrics":
                    self._last_step.update(dict.fromkeys(record["values"], record["step"]))
                elif record["kind"] == "parameters":
                    self._parameters |= record["values"]
        self._outbox = path.open("ab", buffering=0)  # each line reaches the kernel at once and survives a SIGKILL

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._active and self._outbox is not None:
            self._outbox.write(json.dumps(record).encode() + b"\n")

    def _source_tags(self) -> dict[str, str]:
        code = provenance.code()
        tags = {
            "mlflow.source.name": "train.py",
            "mlflow.source.type": "LOCAL",
            "command": mask(provenance.command_line()),
            "directory": str(self.directory.resolve()),
        }
        if code.commit is not None:
            tags |= {"mlflow.source.git.commit": code.commit, "mlflow.source.git.branch": code.branch or ""}
            tags["git.dirty"] = str(code.dirty).lower()
        return tags


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(inner, Mapping) and inner:
            flat |= _flatten(inner, name)
        else:
            flat[name] = inner
    return flat


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_PARAMETER else text[: _LONGEST_PARAMETER - 12] + " [truncated]"


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
