"""Small random models, for measuring a server's overhead and for comparing it with transformers.

`python -m bench.models DIR` makes `tiny` in DIR.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common.models import DEFAULT_MODEL, resolve
from engine.conversion import whole_folder
from engine.prepare import prepare

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Small enough that a step costs next to nothing, deep enough that a fault in one layer reaches the next.
_SMALL: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    # With the usual 0.02 a random model repeats one token whatever attention, positions or windows do, and a
    # comparison on it proves nothing. With these weights each of them changes the greedy tokens.
    "initializer_range": 0.2,
}
_QUERY_KEY_GAIN = 3.0
_QUERY_KEY_NAMES = ("q_proj", "k_proj", "qkv", "query_key", "c_attn")


def make_random(folder: Path, family: str, config: Mapping[str, Any], tokenizer: Path | None = None) -> None:
    """Writes a model of `family` with random float32 weights, always the same; `config` overrides the small defaults.

    The tokenizer is copied from the folder `tokenizer`. Raises whatever transformers does where it cannot build it.
    """
    torch.manual_seed(0)
    built = AutoConfig.for_model(family, **{**_SMALL, **config})
    model: Any = AutoModelForCausalLM.from_config(built, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(part in name for part in _QUERY_KEY_NAMES):
                weight.mul_(_QUERY_KEY_GAIN)
    model.generation_config.eos_token_id = built.eos_token_id
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        for name in _TOKENIZER_FILES if tokenizer else ():
            shutil.copy(tokenizer / name, partial / name)  # type: ignore[operator]


def make_tiny(folder: Path) -> None:
    """A 2-layer, 64-wide Llama with the default model's tokenizer: what a request costs on it is the server's share."""
    real = prepare(resolve(DEFAULT_MODEL), lambda phase, fraction: None)
    make_random(folder, "llama", {"num_hidden_layers": 2, "head_dim": 32}, tokenizer=real)


if __name__ == "__main__":
    make_tiny(Path(sys.argv[1]))
