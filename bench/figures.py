"""What benchmarks find: figures, one table of them, and the file that keeps every run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

HISTORY = Path(__file__).parent / "history.jsonl"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `ratio`: how much better than the float32 reference that ran in turn with it; `peers`: what others
    were measured to do, elsewhere."""

    what: str
    value: float
    unit: str
    ratio: float | None = None
    peers: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        value = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return self.what, f"{value} {self.unit}", "" if self.ratio is None else f"{self.ratio:.2f} ×", self.peers


def table(figures: Iterable[Figure]) -> str:
    """All of them as one table in Markdown."""
    return markdown(("", "measured", "float32 reference", "others, elsewhere"), (f.cells() for f in figures))


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine() -> str:
    """The CPU by name, and how many of its cores are ours."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The checked-out commit, with a plus where files differ from it; empty where this is no checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10"]
    found = subprocess.run(command, cwd=HISTORY.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def keep(figures: Sequence[Figure], file: Path = HISTORY) -> None:
    """Appends the run to the history: one line of JSON."""
    run = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
        "figures": [asdict(figure) for figure in figures],
    }
    with file.open("a") as lines:
        lines.write(json.dumps(run, ensure_ascii=False) + "\n")


def parse(text: str) -> list[Figure]:
    """Figures that another process printed as a JSON list."""
    return [Figure(**item) for item in json.loads(text)]


def dump(figures: Sequence[Figure]) -> str:
    """The inverse of `parse`."""
    return json.dumps([asdict(figure) for figure in figures])
