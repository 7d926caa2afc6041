"""The results of a run, at its end: curves.png and, if its set-up is a documented one, the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from run import Observer
from runtime.files import best_effort
from watch.curves import plot
from watch.reference import judgement


@dataclass
class Results(Observer):
    """Makes both, on the main process. While a run lasts `report.py` draws the curves."""

    out_dir: Path

    def end(self, how: str) -> None:
        with best_effort(str(self.out_dir / "curves.png"), ValueError):  # the log is damaged
            plot(self.out_dir)
        if text := judgement(self.out_dir):
            print(text, flush=True)
