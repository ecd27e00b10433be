"""The whole engine against transformers' own `generate`: the same greedy tokens, whatever the schedule does.

Prompts are longer than the families' windows, are fed in chunks, share steps with each other's decoding, and in one
test outgrow the cache, so that some are preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from common.sampling import SamplingParams
from engine.devices.torch_device import TorchDevice
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.harness import Harness
from tests.engine.model.driver import decidable_greedy, load_runner
from tests.models import ZOO, ZOO_VOCABULARY

LENGTHS = (1, 7, 70, 90, 130, 33)  # longer than the windows of 64, and around block edges
GROWING = (33, 30, 71, 31)  # together they outgrow the 55 blocks of 4 that they get
NEW_TOKENS = 20
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 160

runner = lru_cache(maxsize=1)(load_runner)
reference = lru_cache(maxsize=2)(decidable_greedy)


def harness(model: ModelRunner, *, steps_ahead: int, blocks: int, block_size: int) -> Harness:
    """The engine around a real model, in chunks of at most 48 tokens."""
    model.allocate(blocks, block_size)
    rows = 2 * MAX_NUM_SEQS
    with torch.inference_mode():
        sampler = Sampler(rows, model.vocab_size, model.device)
    return Harness(
        steps_ahead=steps_ahead,
        blocks=blocks,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        budget=48,
        max_model_len=MAX_MODEL_LEN,
        device=TorchDevice(model, sampler, rows, block_size, MAX_MODEL_LEN),
        vocab_size=model.vocab_size,
        end_token_ids=(),
    )


def generate(h: Harness, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once, greedily."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for handle, prompt in enumerate(prompts):
        h.submit(handle, prompt, params)
    h.drain()
    h.assert_all_returned()
    return [h.output.tokens[handle] for handle in range(len(prompts))]


@pytest.mark.parametrize("family", sorted(ZOO))
def test_greedy_tokens_equal_generate_for_every_family(family: str, zoo_folder: Callable[[str], Path]) -> None:
    folder = zoo_folder(family)
    prompts, expected = reference(folder, LENGTHS, NEW_TOKENS, ZOO_VOCABULARY)
    for steps_ahead in (0, 1, 4, 8):
        tokens = generate(harness(runner(folder), steps_ahead=steps_ahead, blocks=60, block_size=16), prompts)
        assert tokens == [greedy for greedy, _ in expected], f"steps ahead {steps_ahead}"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_preempted_requests_are_recomputed_to_the_same_tokens(family: str, zoo_folder: Callable[[str], Path]) -> None:
    folder = zoo_folder(family)
    prompts, expected = reference(folder, GROWING, NEW_TOKENS, ZOO_VOCABULARY)
    for steps_ahead in (0, 8):
        h = harness(runner(folder), steps_ahead=steps_ahead, blocks=56, block_size=4)
        assert generate(h, prompts) == [greedy for greedy, _ in expected]
        assert h.scheduler.preemptions > 0


def test_the_real_model_equals_generate(smollm2_folder: Path) -> None:
    prompts, expected = reference(smollm2_folder, LENGTHS, NEW_TOKENS, 49152)
    for steps_ahead in (0, 1, 4, 8):
        tokens = generate(harness(runner(smollm2_folder), steps_ahead=steps_ahead, blocks=60, block_size=16), prompts)
        assert tokens == [greedy for greedy, _ in expected], f"steps ahead {steps_ahead}"
