"""SIGTERM and Ctrl-C: finish the step, write a checkpoint, end as KILLED. A second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from orchestra.errors import Interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Records the first signal; outside deferred sections it raises `Interrupted` where the program stands."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[Interrupts]:
        """Own SIGTERM and SIGINT for the duration (only the main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self.install()
        try:
            yield self
        finally:
            self.received, self._deferred = None, False
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def install(self) -> None:
        """Take the signals (again): Lightning's trainer registers a SIGTERM handler of its own when it starts."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)

    def defer(self, deferred: bool) -> None:
        """While deferred, a signal is only recorded and the training loop raises at its next safe point."""
        self._deferred = deferred

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if signum == signal.SIGINT:
                print("\nSecond interrupt: exiting at once.", file=sys.stderr, flush=True)
                os._exit(128 + signum)
            return
        self.received = signum
        name = signal.Signals(signum).name
        if self._deferred:
            print(
                f"\n{name}: finishing this step and writing a checkpoint (Ctrl-C again exits at once).",
                file=sys.stderr,
                flush=True,
            )
        else:
            raise Interrupted(signum)


INTERRUPTS = Interrupts()
