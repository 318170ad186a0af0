"""Tracking against a real MLflow server that hangs, dies and comes back; secrets; the outbox."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestra.outbox import OUTBOX
from orchestra.secrets import mask, mask_mapping, names_secret
from orchestra.tracking import MLflowTracker, TrackingUnavailable
from tests.conftest import ROOT


class Server:
    """`mlflow server` on loopback that can be stopped and started again."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.directory, self.uri = directory, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--backend-store-uri",
            "sqlite:///server.db",
            "--artifacts-destination",
            "artifacts",
            "--workers",
            "1",
        ]
        self.process = subprocess.Popen(
            command, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(self.uri + "/health", timeout=2):
                    return
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.3)

    def signal(self, signum: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signum)

    def stop(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.stop()


def tracker(server: Server, directory: Path, **options: object) -> MLflowTracker:
    settings = {"system_metrics_interval": None, "flush_interval": 0.2, "drain_timeout": 60.0} | options
    return MLflowTracker(
        experiment="e",
        run_name="r",
        directory=directory,
        tracking_uri=server.uri,
        **settings,  # type: ignore[arg-type]
    )


def points(server: Server, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in MlflowClient(server.uri).get_metric_history(run_id, name)]


@pytest.mark.parametrize("failure", ["hangs", "dies"])
def test_a_store_that_is_away_delays_nothing_and_loses_nothing(server: Server, tmp_path: Path, failure: str) -> None:
    one = tracker(server, tmp_path / "run")
    one.start()
    one.log_metrics({"a": 0.5}, step=0)
    time.sleep(1.0)
    server.signal(signal.SIGSTOP) if failure == "hangs" else server.stop()
    began = time.perf_counter()
    for step in range(1, 400):
        one.log_metrics({"a": step / 7, "b": float("nan")}, step=step)
    assert time.perf_counter() - began < 5.0, "logging waited for the store"
    one.log_text("kept", "notes/text.txt")
    time.sleep(1.0)
    server.signal(signal.SIGCONT) if failure == "hangs" else server.start()
    one.finish("FINISHED")
    assert points(server, one.run_id, "a") == [(0, 0.5)] + [(step, step / 7) for step in range(1, 400)]
    client = MlflowClient(server.uri)
    assert client.get_run(one.run_id).info.status == "FINISHED"
    assert [entry.path for entry in client.list_artifacts(one.run_id, "notes")] == ["notes/text.txt"]


def test_what_a_dead_store_missed_is_delivered_later(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = tracker(server, tmp_path / "run", drain_timeout=1.0)
    one.start()
    server.stop()
    one.log_metrics({"a": 1.0}, step=3)
    one.finish("FINISHED")
    assert f"python -m orchestra.delivery {tmp_path / 'run'}" in caplog.text
    server.start()
    for _ in range(2):  # the second time there is nothing left, and nothing is doubled
        command = [sys.executable, "-m", "orchestra.delivery", str(tmp_path / "run")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Everything is delivered" in done.stdout, done.stderr
    assert points(server, one.run_id, "a") == [(3, 1.0)]
    assert MlflowClient(server.uri).get_run(one.run_id).info.status == "FINISHED"


def test_a_continued_run_repeats_no_point_and_keeps_changed_parameters_as_tags(server: Server, tmp_path: Path) -> None:
    first = tracker(server, tmp_path / "run")
    first.start()
    first.log_parameters({"lr": 0.1, "nested": {"a": None, "b": True}})
    for step in range(5):
        first.log_metrics({"a": float(step)}, step=step)
    first.finish("KILLED")
    with (tmp_path / "run" / OUTBOX).open("ab") as outbox:
        outbox.write(b'{"kind": "metrics", "st')  # a kill in the middle of a write
    second = tracker(server, tmp_path / "run", run_id=first.run_id)
    second.start()
    second.log_parameters({"lr": 0.2, "nested": {"a": None, "b": True}})
    for step in range(3, 8):
        second.log_metrics({"a": float(step)}, step=step)
    second.finish("FINISHED")
    assert second.run_id == first.run_id
    assert points(server, first.run_id, "a") == [(step, float(step)) for step in range(8)]
    run = MlflowClient(server.uri).get_run(first.run_id)
    assert run.data.params == {"lr": "0.1", "nested.a": "null", "nested.b": "true"}
    assert run.data.tags["resumed.lr"] == "0.2" and run.info.status == "FINISHED"


def test_a_store_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    one = MLflowTracker(
        experiment="e", run_name="r", directory=tmp_path, tracking_uri="http://someone:hunter22@127.0.0.1:9"
    )
    with pytest.raises(TrackingUnavailable) as caught:
        one.start()
    assert "http://someone:***@127.0.0.1:9" in str(caught.value) and "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:pass@host/db", "postgresql://me:***@host/db"),
        ("see https://h/x?a=1&token=abc&b=2", "see https://h/x?a=1&token=***&b=2"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("http://127.0.0.1:5000/#/x", "http://127.0.0.1:5000/#/x"),
    ],
)
def test_uris_lose_their_passwords(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_secret_names_are_told_from_tokens_of_text() -> None:
    assert all(map(names_secret, ["api_key", "DB_PASSWORD", "HF_TOKEN", "aws_secret_access_key", "token"]))
    assert not any(map(names_secret, ["max_tokens", "tokenizer", "switch_unit", "tokens_seen", "author", "keep"]))
    assert mask_mapping({"a": {"api_key": "xyz"}, "b": ["x", 1]}) == {"a": {"api_key": "***"}, "b": ["x", 1]}


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "correct horse")
    assert mask("it is 'correct horse'!") == "it is '***'!"
