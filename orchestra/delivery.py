"""Delivers a run's outbox to its MLflow store, each record once, in order, whatever happens to either side.

    python -m orchestra.delivery <run directory>

delivers what a store that was away has missed. During a run the same program runs beside it (`--follow`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A store that hangs must be noticed in seconds; the retries are ours.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from orchestra.outbox import OUTBOX, POSITION, RECORD
from orchestra.secrets import mask
from orchestra.system_metrics import SystemMetrics

log = logging.getLogger("orchestra.delivery")

_METRICS_PER_BATCH = 1000  # MLflow's limits
_PARAMETERS_PER_BATCH = 100
# Errors that trying again cannot mend.
_PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"}


class Store:
    """One run in an MLflow store."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.client = MlflowClient(tracking_uri=uri)
        self.run_id = ""

    def open(self, record: dict[str, Any]) -> str:
        """Create the run, or continue `record["run_id"]`; returns the experiment's id."""
        experiment_id = self._experiment(record["experiment"])
        tags = dict(record["tags"])
        if record["run_id"]:
            self.run_id = record["run_id"]
            self.client.update_run(self.run_id, status="RUNNING")
            for key, value in tags.items():
                self.client.set_tag(self.run_id, key, value)
            return str(self.client.get_run(self.run_id).info.experiment_id)
        if record["parent_run_id"]:
            tags["mlflow.parentRunId"] = record["parent_run_id"]
        run = self.client.create_run(experiment_id, run_name=record["run_name"], tags=tags)
        self.run_id = run.info.run_id
        return experiment_id

    def _experiment(self, name: str) -> str:
        """Id of the experiment, made if need be: two runs may try at once."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            with contextlib.suppress(MlflowException):  # another run was faster
                self.client.create_experiment(
                    name,
                    artifact_location=_artifact_location(self.uri, name),
                    tags={"mlflow.experimentKind": "custom_model_development"},  # opens as "Model training" in the UI
                )
            found = self.client.get_experiment_by_name(name)
        if found is None:
            raise MlflowException(f"experiment {name!r} could not be created")
        if found.lifecycle_stage == "deleted":
            raise MlflowException(
                f"experiment {name!r} was deleted; restore it with: mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)

    def send(self, records: list[dict[str, Any]]) -> None:
        """Deliver records of one kind."""
        kind = records[0]["kind"]
        if kind == "metrics":
            self.client.log_batch(self.run_id, metrics=[m for record in records for m in _metrics(record)])
            return
        for record in records:
            getattr(self, f"_send_{kind}")(record)

    def _send_parameters(self, record: dict[str, Any]) -> None:
        parameters = [Param(key, value) for key, value in record["values"].items()]
        for begin in range(0, len(parameters), _PARAMETERS_PER_BATCH):
            self.client.log_batch(self.run_id, params=parameters[begin : begin + _PARAMETERS_PER_BATCH])

    def _send_tags(self, record: dict[str, Any]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in record["values"].items()])

    def _send_artifact(self, record: dict[str, Any]) -> None:
        path, folder = Path(record["path"]), record["folder"]
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), f"{folder}/{path.name}" if folder else path.name)
        else:
            self.client.log_artifact(self.run_id, str(path), folder)

    def _send_dataset(self, record: dict[str, Any]) -> None:
        dataset = Dataset(
            name=record["name"],
            digest=record["digest"],
            source_type="local",
            source=json.dumps({"uri": record["source"]}),
            profile=json.dumps(record["profile"]),
        )
        context = [InputTag("mlflow.data.context", record["context"])]
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, context)])

    def _send_status(self, record: dict[str, Any]) -> None:
        self.client.set_terminated(self.run_id, status=record["status"])

    def present(self, records: list[dict[str, Any]]) -> set[tuple[str, int, int]]:
        """Which points (name, step, time) of these metric records the store already has."""
        names = {name for record in records for name in record["values"]}
        return {
            (name, point.step, point.timestamp)
            for name in names
            for point in self.client.get_metric_history(self.run_id, name)
        }


class Delivery:
    """Reads the outbox from where the last delivery stopped, and remembers how far it has come."""

    def __init__(self, directory: Path, store: Store) -> None:
        self.directory, self.store = directory, store
        position = directory / POSITION
        self.offset = int(position.read_text()) if position.exists() else 0
        self._in_doubt = True  # the batch at the offset may have arrived before its delivery was noted
        self.ended = False

    def pending(self) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Batches of whole records of one kind and the offset behind each."""
        with (self.directory / OUTBOX).open("rb") as file:
            file.seek(self.offset)
            end, batch, size = self.offset, list[dict[str, Any]](), 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                weight = len(record.get("values", ())) if record["kind"] == "metrics" else _METRICS_PER_BATCH
                if batch and (size + weight > _METRICS_PER_BATCH or batch[0]["kind"] != record["kind"]):
                    yield batch, end
                    batch, size = [], 0
                batch.append(record)
                size += weight
                end += len(line)
            if batch:
                yield batch, end

    def deliver(self, give_up_after: float | None = None) -> bool:
        """Deliver everything that is there; False if the store did not answer for `give_up_after` seconds."""
        for batch, end in self.pending():
            if not self._persist(batch, give_up_after):
                return False
            self.ended = self.ended or batch[-1]["kind"] == "status"
            self.offset = end
            partial = self.directory / (POSITION + ".partial")
            partial.write_text(str(end))
            partial.replace(self.directory / POSITION)
        self._in_doubt = False
        return True

    def _persist(self, batch: list[dict[str, Any]], give_up_after: float | None) -> bool:
        """Send one batch, waiting for a store that is away."""
        told = False

        def tell(state: Any) -> None:
            nonlocal told
            if not told:
                reason = _reason(state.outcome.exception())
                _say(f"MLflow does not answer ({reason}). Training goes on; metrics are kept.")
            told = True

        attempts = Retrying(
            retry=retry_if_exception(lambda error: not _is_permanent(error)),
            wait=wait_exponential(multiplier=0.5, max=10),
            stop=stop_after_delay(give_up_after) if give_up_after is not None else _stop_when_abandoned,
            before_sleep=tell,
            reraise=True,
        )
        try:
            attempts(self._send, batch)
        except Exception as error:
            if not _is_permanent(error):
                return False
            _say(f"MLflow refused {batch[0]['kind']}: {_reason(error)}")
        if told:
            _say("MLflow answers again; everything kept is being delivered.")
        return True

    def _send(self, batch: list[dict[str, Any]]) -> None:
        if self._in_doubt and batch[0]["kind"] == "metrics":
            present = self.store.present(batch)
            for record in batch:
                record["values"] = {
                    name: value
                    for name, value in record["values"].items()
                    if (name, record["step"], record["time"]) not in present
                }
        self._in_doubt = True  # until the next batch is known to have arrived
        self.store.send(batch)
        self._in_doubt = False


def follow(directory: Path, record: dict[str, Any]) -> int:
    """Run beside the training process until it ends: its end closes our standard input."""
    uri = os.environ["MLFLOW_TRACKING_URI"]
    with FileLock(directory / "delivery.lock"):  # the delivery of an earlier start may still be finishing
        try:
            with _schema_lock(uri):
                store = Store(uri)
                experiment_id = store.open(record)
        except Exception as error:
            print(json.dumps({"error": _reason(error)}), flush=True)
            return 1
        print(json.dumps({"run_id": store.run_id, "experiment_id": experiment_id}), flush=True)
        delivery = Delivery(directory, store)
        interval = record["intervals"]["system_metrics"]
        system = SystemMetrics(store.client, store.run_id, record["pid"], interval) if interval else None
        if system:
            system.start()
        while not _input_closed(record["intervals"]["flush"]):
            delivery.deliver()
        if system:
            system.stop()
        done = delivery.deliver(give_up_after=record["drain_timeout"])
        if done and not delivery.ended:  # the training process was killed and could not say so
            store.client.set_terminated(store.run_id, status="KILLED")
        return 0 if done else 3


def catch_up(directory: Path, record: dict[str, Any]) -> int:
    """Deliver what is left of an ended run."""
    uri = record["tracking_uri"]
    if record["uri_has_credentials"]:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            _say(f"{record['tracking_uri']} needs credentials: set MLFLOW_TRACKING_URI to the whole URI")
            return 2
    with FileLock(directory / "delivery.lock"):
        store = Store(uri)
        store.run_id = record["run_id"]
        done = Delivery(directory, store).deliver(give_up_after=10.0)
    print("Everything is delivered." if done else f"{mask(uri)} does not answer; nothing is lost, try again later.")
    return 0 if done else 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestra.delivery", description=__doc__)
    parser.add_argument("directory", type=Path, help="directory of the run")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    file = arguments.directory / RECORD
    if not file.exists():
        _say(f"{arguments.directory} is not the directory of a tracked run ({RECORD} is missing)")
        return 2
    record = json.loads(file.read_text())
    if arguments.follow:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the training process, whose end we still have to tell
    return follow(arguments.directory, record) if arguments.follow else catch_up(arguments.directory, record)


def _metrics(record: dict[str, Any]) -> list[Metric]:
    return [Metric(name, value, record["time"], record["step"]) for name, value in record["values"].items()]


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Artifacts of an embedded SQLite store lie beside it; a server decides for itself."""
    if not uri.startswith("sqlite:///"):
        return None
    database = Path(uri.removeprefix("sqlite:///")).resolve()
    return (database.parent / "mlartifacts" / experiment).as_uri()


def _schema_lock(uri: str) -> contextlib.AbstractContextManager[Any]:
    """Held while an embedded store is opened: two processes must not create one SQLite schema at once."""
    if not uri.startswith("sqlite:///"):
        return contextlib.nullcontext()
    database = Path(uri.removeprefix("sqlite:///")).resolve()
    return FileLock(database.with_name(database.name + ".lock"))


def _is_permanent(error: BaseException) -> bool:
    if isinstance(error, MlflowException):
        return error.error_code in _PERMANENT
    return isinstance(error, FileNotFoundError | KeyError | TypeError | AttributeError)


def _reason(error: BaseException | None) -> str:
    text = mask(str(error)).strip().split(" failed with exception")[0]  # what requests adds is a page long
    return text.splitlines()[0][:300] if text else type(error).__name__


def _input_closed(timeout: float) -> bool:
    """Wait up to `timeout` seconds for the end of standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _stop_when_abandoned(state: Any) -> bool:
    """While training goes on we try for ever; once it has ended, `follow` gives the store a last chance."""
    return _input_closed(0.0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
