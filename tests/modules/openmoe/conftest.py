from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ORACLES = Path(__file__).parent / "oracles"


@pytest.fixture(scope="session")
def oracle() -> Any:
    """Load an oracle by name: arrays as tensors, scalars as numbers, JSON as it is."""

    def load(name: str) -> Any:
        if name.endswith(".json"):
            return json.loads((ORACLES / name).read_text())
        with np.load(ORACLES / f"{name}.npz") as stored:
            return {
                key: torch.from_numpy(stored[key]) if stored[key].ndim else stored[key].item() for key in stored.files
            }

    return load
