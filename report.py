"""Shows and compares runs, also while they go on.

    python report.py runs/a runs/b                       a page that compares them, and curves.png of each
    python report.py --compare a1 a2 a3 -- b1 b2 b3      is the difference noise? reports/compare.py
    python report.py runs/x --reference NAME             reached, not reached, or why it cannot be judged

NAME is a file in references/.
"""

import argparse
from pathlib import Path

from reports import reference
from reports.compare import compare
from reports.curves import plot
from reports.page import write_page
from runtime.history import read_results, read_run
from runtime.start import print_any_text


def main() -> None:
    """The command line. Ends with exit status 2 and a sentence for what cannot be read."""
    print_any_text()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; after --compare A... -- those of B")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: report.html in the first run)")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--compare", nargs="+", type=Path, metavar="A", help="compare these runs with those after --")
    answers.add_argument("--reference", choices=reference.names(), metavar="NAME", help="judge each run by it")
    args = parser.parse_args()
    if not args.runs:
        parser.error("name one or more run folders; with --compare A... -- B... on both sides")
    try:
        if args.compare:
            print(compare(list(map(read_results, args.compare)), list(map(read_results, args.runs))))
        elif args.reference:
            print("\n\n".join(reference.report(args.reference, run) for run in map(read_results, args.runs)))
        else:
            write_pages(args.runs, args.output or args.runs[0] / "report.html")
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(2, f"error: {error}\n")


def write_pages(runs: list[Path], file: Path) -> None:
    """The page that compares the runs, and the curves of each whose log has grown. Raises ValueError or OSError."""
    histories = list(map(read_run, runs))
    for run in histories:
        if not run.lines and "out_dir" not in run.config:  # a model has a config.json, too
            raise ValueError(f"{run.folder} is no run: it has neither its metrics.jsonl nor config.json.")
    write_page(file, histories, list(map(reference.published_curves, histories)))
    for run in histories:
        picture, log = run.folder / "curves.png", run.folder / "metrics.jsonl"
        if not picture.exists() or (log.exists() and log.stat().st_mtime > picture.stat().st_mtime):
            plot(run)
    print(file)


if __name__ == "__main__":
    main()
