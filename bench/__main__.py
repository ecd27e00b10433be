"""Everything that is measured, as one table, and a line of history: `python -m bench`, or `make bench`.

Parts run one after the other in processes of their own: `overhead` (the server around a tiny model, two processes
against one), `steps` (the real model without a server), `throughput` (behind it), `profile` (what is small in a step).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from bench.figures import Figure, keep, machine, parse, table

PARTS = {
    "overhead": ("-m", "bench.overhead", "--json"),
    "steps": ("-m", "bench.steps", "--json"),
    "throughput": ("-m", "bench.throughput", "--json"),
    "profile": ("-m", "bench.profile", "--json"),
}


def run(part: str) -> list[Figure]:
    """Its figures; what it says meanwhile goes to standard error. Raises CalledProcessError."""
    command = [sys.executable, *PARTS[part]]
    return parse(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run (default: %(default)s)")
    parser.add_argument("--no-history", action="store_true", help="leave bench/history.jsonl as it is")
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only is {', '.join(sorted(unknown))}, but must be of {', '.join(PARTS)}")
    figures = [figure for name in names for figure in run(name)]
    print(f"{machine()}\n\n{table(figures)}")
    if not options.no_history:
        keep(figures)


if __name__ == "__main__":
    main()
