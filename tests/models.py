"""The models that tests run on: the real default, a tiny one, and one small random model per architecture family.

Made on first use and kept in the user's cache between runs. `python -m tests.models` makes all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock

from bench.models import make_random, make_tiny
from common.models import DEFAULT_MODEL, cache_root, resolve
from engine.prepare import prepare

RECIPE = 2  # rises when the models below change
ZOO_VOCABULARY = 2048
WINDOW = 64  # tokens; prompts have to be longer for a window to matter

# What each family needs beside the small defaults.
ZOO: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": WINDOW},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "olmo2": {},
    "cohere": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    "gpt2": {"n_inner": 160},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 64, "max_position_embeddings": 2048},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "smollm3": {},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def _root() -> Path:
    root = cache_root() / "test-models" / f"{RECIPE}-transformers-{transformers.__version__}"
    root.mkdir(parents=True, exist_ok=True)
    return root


def smollm2() -> Path:
    """The embedded default model's folder."""
    with FileLock(_root() / "smollm2.lock"):
        return prepare(resolve(DEFAULT_MODEL), lambda phase, fraction: None)


def tiny() -> Path:
    """Two layers, the default model's tokenizer and vocabulary."""
    smollm2()
    folder = _root() / "tiny"
    with FileLock(_root() / "tiny.lock"):
        if not folder.is_dir():
            make_tiny(folder)
    return folder


def zoo(family: str) -> Path:
    """A small random model of `family`, without a tokenizer: prompt it with token ids below ZOO_VOCABULARY.

    Raises what transformers does where this release cannot build the family.
    """
    return random_model(family, family, {**ZOO[family], "vocab_size": ZOO_VOCABULARY})


def random_model(name: str, family: str, config: dict[str, Any]) -> Path:
    """As `zoo`, for a model described by the test itself, under a `name` of its own."""
    folder = _root() / "zoo" / name
    with FileLock(_root() / f"zoo-{name}.lock"):
        if not folder.is_dir():
            make_random(folder, family, config)
    return folder


if __name__ == "__main__":
    print(smollm2(), tiny(), *map(zoo, ZOO), sep="\n")
