"""The model as the API process knows it: its names, its tokenizer, its template and its sampling defaults."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from api_server.chat_template import ChatTemplate
from api_server.errors import ModelNotFoundError
from api_server.generation_config import SamplingDefaults
from api_server.tokenizer import Tokenizer
from common.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Loaded once, in a thread, as soon as the model's folder is complete."""

    names: tuple[str, ...]  # the first is reported; all are answered
    root: str
    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    created: int  # seconds since 1970

    @classmethod
    def load(cls, config: ModelConfig, folder: str) -> ServedModel:
        """Raises OSError or ValueError with a sentence that names the file or the flag."""
        path = Path(folder)
        tokenizer = Tokenizer.load(path)
        return cls(
            names=config.names,
            root=config.model,
            folder=path,
            tokenizer=tokenizer,
            template=ChatTemplate.load(config.chat_template, path, tokenizer.special_tokens),
            defaults=SamplingDefaults.load(config.generation_config, path),
            created=int(time.time()),
        )

    def check_name(self, name: str | None) -> str:
        """The name to answer with: the one asked for, or the first. Raises `ModelNotFoundError`."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(name, self.names)
        return name or self.names[0]
