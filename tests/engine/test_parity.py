"""The whole engine against transformers' own `generate`: the same greedy tokens, whatever the schedule does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from common.config import Config, EngineConfig, ModelConfig
from common.sampling import SamplingParams
from engine.devices.torch_device import TorchDevice
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.harness import Harness
from tests.models import ZOO, ZOO_VOCABULARY

LENGTHS = (1, 7, 70, 90, 130, 33)  # longer than the windows of 64, and around block edges
GROWING = (33, 30, 71, 31)  # together they outgrow the 55 blocks of 4 that they get
NEW_TOKENS = 20
MAX_NUM_SEQS = 4
SEED = 11


def prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@cache
def reference(folder: Path, vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Greedy tokens of transformers' `generate`, eager attention, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
    outputs = []
    with torch.inference_mode():
        for prompt in prompts(vocab_size, lengths):
            ids = model.generate(torch.tensor([prompt]), generation_config=settings)[0].tolist()
            outputs.append(ids[len(prompt) :])
    return outputs


@cache
def runner(folder: Path) -> ModelRunner:
    config = Config(model=ModelConfig(folder=str(folder)), engine=EngineConfig(device="cpu"))
    return ModelRunner.load(replace(config), lambda phase, fraction: None)


def generate(
    folder: Path, vocab_size: int, lengths: tuple[int, ...], *, steps_ahead: int, blocks: int, block_size: int
) -> tuple[list[list[int]], Harness]:
    """All prompts at once, in chunks of at most 48 tokens."""
    model = runner(folder)
    model.allocate(blocks, block_size)
    rows = 2 * MAX_NUM_SEQS
    with torch.inference_mode():
        sampler = Sampler(rows, model.vocab_size, model.device)
    h = Harness(
        steps_ahead=steps_ahead,
        blocks=blocks,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        budget=48,
        max_model_len=160,
        device=TorchDevice(model, sampler, rows, block_size, 160),
        vocab_size=vocab_size,
        end_token_ids=(),
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for handle, prompt in enumerate(prompts(vocab_size, lengths)):
        h.submit(handle, prompt, params)
    h.drain()
    h.assert_all_returned()
    return [h.output.tokens[handle] for handle in range(len(lengths))], h


@pytest.mark.parametrize("family", sorted(ZOO))
def test_greedy_tokens_equal_generate_for_every_family(family: str, zoo_folder: Callable[[str], Path]) -> None:
    folder = zoo_folder(family)
    expected = reference(folder, ZOO_VOCABULARY, LENGTHS)
    for steps_ahead in (0, 1, 4, 8):
        tokens, _ = generate(folder, ZOO_VOCABULARY, LENGTHS, steps_ahead=steps_ahead, blocks=60, block_size=16)
        assert tokens == expected, f"steps ahead {steps_ahead}"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_preempted_requests_are_recomputed_to_the_same_tokens(
    family: str, zoo_folder: Callable[[str], Path]
) -> None:
    folder = zoo_folder(family)
    for steps_ahead in (0, 8):
        tokens, h = generate(folder, ZOO_VOCABULARY, GROWING, steps_ahead=steps_ahead, blocks=56, block_size=4)
        assert h.scheduler.preemptions > 0
        assert tokens == reference(folder, ZOO_VOCABULARY, GROWING)


@pytest.mark.slow
def test_the_real_model_equals_generate(smollm2_folder: Path) -> None:
    expected = reference(smollm2_folder, 49152, LENGTHS)
    for steps_ahead in (0, 1, 4, 8):
        tokens, _ = generate(smollm2_folder, 49152, LENGTHS, steps_ahead=steps_ahead, blocks=60, block_size=16)
        assert tokens == expected
