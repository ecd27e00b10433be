"""The console scripts `stepahead` and `serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from common.options import parse_serve

USAGE = """usage: stepahead COMMAND [options]

commands:
  serve [MODEL]   serve a model over the OpenAI API
  version         print the version

`stepahead COMMAND --help` says more."""


def main(argv: Sequence[str] | None = None) -> int:
    """`stepahead COMMAND …`. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    match command:
        case "serve":
            return _serve(arguments, "stepahead serve")
        case "version" | "--version":
            print(f"stepahead {version('stepahead')}")
            return 0
        case "-h" | "--help" | "help":
            print(USAGE)
            return 0
    print(f"stepahead: no such command: {command!r}\n\n{USAGE}", file=sys.stderr)
    return 2


def serve() -> int:
    """`serve …`, short for `stepahead serve …`."""
    return _serve(sys.argv[1:], "serve")


def _serve(argv: Sequence[str], prog: str) -> int:
    config = parse_serve(argv, prog)
    from common.supervisor import Supervisor

    return Supervisor(config).run()
