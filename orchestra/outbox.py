"""The files through which a training process hands its records to the delivery process, in the run's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUTBOX = "outbox.jsonl"  # every record, one JSON object a line, in order
POSITION = "outbox.position"  # how many bytes of it the store has
RECORD = "tracking.json"  # which run of which store


def write_json(path: Path, value: Any) -> None:
    """Replace `path` at once, so that no reader sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2))
    partial.replace(path)
