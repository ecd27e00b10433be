"""`python -P -m engine.prepare`: makes the model's Hugging Face folder, once, in a process that ends afterwards.

Reads the configuration from the environment. Writes JSON lines to the status pipe, or stdout without one:
{"event": "phase", "phase": "converting", "progress": 0.3}, at last {"event": "prepared", "folder": …} or
{"event": "fatal", "reason": …} with exit status 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.control import CONFIG, STATUS_FD, Control, be_a_child
from common.models import (
    DEFAULT_MODEL,
    Kind,
    ModelError,
    Resolved,
    check_folder,
    conversion_folder,
    is_ready,
    one_line,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = Callable[[str, float], None]

_STDOUT = 1

# What its makers sample the embedded model with (its model card on the hub); at temperature 1 so small a model rambles.
_DEFAULT_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


def prepare(resolved: Resolved, progress: Progress) -> Path:
    """Makes the folder that `resolved` stands for and returns it; at once where it exists.

    `progress(phase, fraction)` tells how far it is; phases are `downloading` and `converting`. Raises ModelError.
    """
    if resolved.folder is not None:
        return resolved.folder
    folder = _download(resolved, progress) if resolved.kind is Kind.HUB else Path(resolved.source)
    if resolved.kind is Kind.HUB and is_ready(folder, check_folder(folder)):
        return folder
    from engine.conversion import convert_folder, convert_gguf  # imports torch

    gguf = resolved.kind is Kind.GGUF
    target = conversion_folder(resolved.name, folder, folder if gguf else folder / "config.json")
    if not target.is_dir():
        if gguf:
            convert_gguf(folder, target, progress, _DEFAULT_SAMPLING if resolved.name == DEFAULT_MODEL else None)
        else:
            convert_folder(folder, target, progress)
    return target


def _download(resolved: Resolved, progress: Progress) -> Path:
    """The hub's snapshot, top-level files only. Huggingface_hub reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE itself."""
    from huggingface_hub import errors, snapshot_download

    where = f"model {resolved.source!r}"
    revision = resolved.revision or "main"
    # The order matters: the first is derived from the second.
    reasons: tuple[tuple[type[Exception], str], ...] = (
        (errors.GatedRepoError, "is gated on the hub: accept its terms there and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "is neither a local folder nor on the hub (or it is private: set HF_TOKEN)"),
        (errors.RevisionNotFoundError, f"has no revision {revision!r} on the hub"),
        (errors.HFValidationError, "is neither a local folder nor a valid hub id"),
        (
            errors.LocalEntryNotFoundError,
            "is no local folder, not in the download cache, and the hub cannot be reached",
        ),
        (OSError, "cannot be downloaded"),
        (errors.HfHubHTTPError, "cannot be downloaded"),
    )
    progress("downloading", 0.0)
    try:
        found = snapshot_download(
            resolved.source,
            revision=resolved.revision,
            cache_dir=resolved.download_dir,
            allow_patterns=_WANTED,
            ignore_patterns=["*/*"],
            tqdm_class=_reporting_bar(progress),
        )
    except Exception as e:
        for kind, reason in reasons:
            if isinstance(e, kind):
                detail = f": {one_line(e)}" if reason == "cannot be downloaded" else ""
                raise ModelError(f"{where} {reason}{detail}") from e
        raise ModelError(f"{where} cannot be downloaded: {one_line(e)}") from e
    progress("downloading", 1.0)
    return Path(found)


def _reporting_bar(progress: Progress) -> Any:
    """A tqdm class that also tells `progress` how many of the bytes, or files, have come."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.total:
                progress("downloading", min(1.0, self.n / self.total))
            return shown

    return Bar


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """Draws conversions on stderr when somebody is watching; downloads draw themselves."""
    from tqdm import tqdm

    with tqdm(total=100, desc=name, unit="%", leave=False, disable=not sys.stderr.isatty(), bar_format=_FORMAT) as bar:

        def draw(phase: str, fraction: float) -> None:
            if phase == "converting":
                bar.set_description(f"{phase} {name}")
                bar.n = round(100 * fraction)
                bar.refresh()

        yield draw


_FORMAT = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}"


def main() -> int:
    """Exit status 0, or 1 after a reported failure."""
    be_a_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing to drain: end when told
    config = Config.from_json(os.environ[CONFIG]).model
    control = Control(None, int(os.environ.get(STATUS_FD, _STDOUT)))
    try:
        resolved = resolve(config.model, config.revision, config.download_dir)
        with _bar(resolved.name) as draw:

            def progress(phase: str, fraction: float) -> None:
                draw(phase, fraction)
                control.report({"event": "phase", "phase": phase, "progress": round(fraction, 3)})

            folder = prepare(resolved, progress)
    except ModelError as e:
        control.report({"event": "fatal", "reason": str(e)})
        return 1
    except Exception as e:
        control.report({"event": "fatal", "reason": f"preparing the model failed: {type(e).__name__}: {one_line(e)}"})
        return 1
    control.report({"event": "prepared", "folder": str(folder)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
