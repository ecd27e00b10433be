"""`python -P -m api_server`: one API process. Started by the supervisor; everything it needs is in the environment."""

from __future__ import annotations

import os
import socket
import sys

from api_server.runtime import Runtime
from common.config import Config
from common.control import CONFIG, EPOCH, INDEX, LISTEN_FDS, RUN_DIR, Control, be_a_child
from common.log import set_up
from common.transport import api_endpoint


def main() -> int:
    """Serves until it is drained or the supervisor is gone. Exit status 1 after a failure, reported up."""
    be_a_child()
    config = Config.from_json(os.environ[CONFIG])
    index, epoch = int(os.environ.get(INDEX, "0")), int(os.environ.get(EPOCH, "1"))
    set_up(config.server.log_level, f"api {index}")
    endpoint = api_endpoint(os.environ.get(RUN_DIR, ""), epoch)
    sockets = [socket.socket(fileno=int(fd)) for fd in os.environ[LISTEN_FDS].split(",")]
    return Runtime(config, Control.from_environment(), epoch, endpoint).run(sockets)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread of the tokenizer's may be at work, and nothing it does matters any more
