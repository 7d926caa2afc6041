"""What a run folder says of a run, as the other files of this room take it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class History:
    """A run: its folder, its flags, and the lines of metrics.jsonl by step."""

    folder: Path
    config: dict[str, object]
    records: list[dict[str, float]]

    @property
    def seed(self) -> object:
        return self.config.get("seed")

    @property
    def last_step(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def names(self) -> set[str]:
        return {name for record in self.records for name in record}

    def points(self, name: str) -> dict[int, float]:
        """Step -> value of a metric, where it is a finite number."""
        found = {int(record["step"]): record.get(name) for record in self.records}
        return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def read_config(folder: Path) -> dict[str, object]:
    """The flags of the run; {} where there is no config.json."""
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.exists() else {}
