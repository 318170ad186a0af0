"""Where a result came from: the command, the code, the packages and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestra.config import ROOT


@dataclass(frozen=True)
class Code:
    """The state of the working tree: `commit` is None outside a git checkout; `diff` is empty when it is clean."""

    commit: str | None
    branch: str | None
    diff: str

    @property
    def dirty(self) -> bool:
        return bool(self.diff)


def code() -> Code:
    """Commit, branch and uncommitted changes of the checkout that this program runs from."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return Code(None, None, "")
    return Code(commit.strip(), (_git("rev-parse", "--abbrev-ref", "HEAD") or "").strip(), _git("diff", "HEAD") or "")


def command_line() -> str:
    """The command as it could be typed again."""
    program = Path(sys.argv[0])
    shown = os.path.relpath(program) if program.exists() else str(program)
    return shlex.join(["python", shown, *sys.argv[1:]])


def packages() -> str:
    """Installed distributions, one `name==version` a line, in alphabetical order."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return "\n".join(f"{name}=={version}" for name, version in sorted(found.items(), key=lambda p: p[0].lower()))


def machine() -> dict[str, str]:
    """Host facts worth filtering runs by."""
    import torch

    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
        "torch_threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_count"] = str(torch.cuda.device_count())
    return facts


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a checkout: an installed package has no commit to report
    return done.stdout
