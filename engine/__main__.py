"""`python -P -m engine`: one engine process. Started by the supervisor; everything it needs is in the environment."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.control import CONFIG, EPOCH, INDEX, RUN_DIR, Control, be_a_child
from common.log import set_up
from common.messages import Call
from common.models import ModelError
from common.transport import EngineIntake, EngineOutbox, engine_endpoint

if TYPE_CHECKING:
    from engine.core import Engine

log = logging.getLogger("engine")


def main() -> int:
    """Loads, serves until it is told to stop or the supervisor is gone. Exit status 1 after a failure, reported up."""
    be_a_child()
    config = Config.from_json(os.environ[CONFIG])
    index, epoch = int(os.environ.get(INDEX, "0")), int(os.environ.get(EPOCH, "1"))
    set_up(config.server.log_level, f"engine {index}")
    control = Control.from_environment()
    serving: list[Engine] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "stop" and not serving:
            os._exit(0)  # nothing is open while the model loads
        for engine in serving:
            if event["event"] == "stop":
                engine.shutdown()
            elif event["event"] == "drop_api":
                engine.handle(Call("drop_api", {"api_id": event["api_id"]}))

    control.listen(on_event, lambda: os._exit(1))
    try:
        from engine.core import Engine, load  # torch comes in here, when the pipes are up

        def progress(phase: str, fraction: float) -> None:
            control.report({"event": "phase", "phase": phase, "progress": round(fraction, 3)})

        loaded = load(config, progress)
    except ModelError as e:
        control.report({"event": "fatal", "reason": str(e)})
        return 1
    except Exception as e:
        log.exception("loading failed")
        control.report({"event": "fatal", "reason": f"loading failed: {type(e).__name__}: {e}"})
        return 1
    outbox = EngineOutbox()
    engine = Engine(config, loaded, index, epoch, outbox)
    intake = EngineIntake(engine_endpoint(os.environ[RUN_DIR], index, epoch), engine.handle)
    serving.append(engine)
    intake.start()
    control.report({"event": "ready"})
    try:
        engine.run()
    except Exception as e:
        log.exception("the engine failed")
        control.report({"event": "fatal", "reason": str(e)})
        return 1
    intake.stop()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the device thread may be inside a step, and nothing it does matters any more
