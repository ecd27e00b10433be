"""What a stored format costs in quality: perplexity on a fixed text, and agreement with float32's likeliest tokens.

`python -m bench.quality FOLDER [--formats int8,int4]`. The text is the repository's LICENSE. Every format reads it in
the same chunks; agreement counts the positions at which a format's likeliest next token is float32's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from common.config import Config, EngineConfig, ModelConfig
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
TOKENS = 1536
CHUNK = 256
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """Of the text by one format."""

    format: str
    perplexity: float
    likeliest: torch.Tensor  # [TOKENS - 1] int64


def read(folder: Path, format: str, tokens: list[int]) -> Reading:
    """Loads the model in `format` and reads the tokens. Raises ModelError."""
    quantized = format in ("int8", "int4")
    model = ModelConfig(
        folder=str(folder), dtype="auto" if quantized else format, quantization=format if quantized else "none"
    )
    runner = ModelRunner.load(Config(model=model, engine=EngineConfig(device="cpu")), lambda phase, fraction: None)
    blocks = -(-len(tokens) // BLOCK)
    runner.allocate(blocks + 1, BLOCK)
    table = list(range(1, blocks + 1))
    losses, likeliest = [], []
    for begin in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[begin : min(begin + CHUNK, len(tokens) - 1)]
        logits = runner.forward(make_batch([chunk], [begin], [table], BLOCK, runner.device))
        following = torch.tensor(tokens[begin + 1 : begin + 1 + len(chunk)])
        losses.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        likeliest.append(logits.argmax(dim=1))
    return Reading(format, float(torch.cat(losses).mean().exp()), torch.cat(likeliest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", default="float16,bfloat16,int8,int4")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text()).ids[:TOKENS]
    with torch.inference_mode():
        reference = read(options.folder, "float32", tokens)
        print(f"| format | perplexity | × float32 | same likeliest token |\n| --- | ---: | ---: | ---: |\n"
              f"| float32 | {reference.perplexity:.3f} | 1 | 100 % |")  # fmt: skip
        for format in options.formats.split(","):
            reading = read(options.folder, format, tokens)
            same = float((reading.likeliest == reference.likeliest).float().mean())
            ratio = reading.perplexity / reference.perplexity
            print(f"| {format} | {reading.perplexity:.3f} | {ratio:.4f} | {same:.1%} |")


if __name__ == "__main__":
    main()
