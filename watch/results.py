"""The results of a run, at its end: the verdict, if its set-up is a documented one, and curves.png."""

from dataclasses import dataclass
from pathlib import Path

from run import Observer
from runtime.files import best_effort
from runtime.history import read_run
from runtime.parts import part


@dataclass
class Results(Observer):
    """Makes both, on the main process. While a run lasts `report.py` draws the curves."""

    out_dir: Path

    def end(self, how: str) -> None:
        # ValueError: the log is damaged, or reports/ has been deleted.
        with best_effort(f"the verdict and {self.out_dir / 'curves.png'}", ValueError):
            run = read_run(self.out_dir)
            if text := part("reports.reference", "the results of a run").judgement(run):
                print(text, flush=True)
            part("reports.curves", "the results of a run").plot(run)
