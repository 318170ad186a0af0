"""CPU, memory, disk, network and GPU of a run, sampled beside it and shown in MLflow's system metrics."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor


class SystemMetrics:
    """Samples every `interval` seconds in a thread of the delivery process.

    Beside MLflow's own monitors it reports the resident memory of the training process and its children. A sample
    that the store does not take is dropped: the next one is as good.
    """

    def __init__(self, client: MlflowClient, run_id: str, pid: int, interval: float) -> None:
        self.client, self.run_id, self.pid, self.interval = client, run_id, pid, interval
        self.monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with contextlib.suppress(Exception):  # no NVIDIA GPU, or no driver: there is nothing to sample
            self.monitors.append(GPUMonitor())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=15)

    def _sample(self) -> None:
        step = self._next_step()
        while True:
            values: dict[str, float] = {}
            for monitor in self.monitors:
                monitor.collect_metrics()
                values |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            values["process_memory_megabytes"] = self._process_memory()
            now = int(time.time() * 1000)
            points = [Metric(f"system/{name}", value, now, step) for name, value in values.items()]
            with contextlib.suppress(Exception):
                self.client.log_batch(self.run_id, metrics=points)
                step += 1
            if self._stop.wait(self.interval):
                return

    def _next_step(self) -> int:
        """A continued run goes on counting."""
        with contextlib.suppress(Exception):
            history = self.client.get_metric_history(self.run_id, "system/cpu_utilization_percentage")
            return max((point.step for point in history), default=-1) + 1
        return 0

    def _process_memory(self) -> float:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 1e6
        return 0.0
