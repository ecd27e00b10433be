"""A seeded request draws the same tokens alone, in a batch of 32, and at every K.

Where two runs differ at all, they may do so only where rounding decides: the test looks at the first difference and
shows that the two candidates' scores lie closer than the batch's kernels move logits.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from engine.devices.torch_device import TorchDevice
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.harness import Harness
from tests.engine.model.driver import load_runner, random_prompts

TOKENS = 24
ROUNDING = 1e-3  # of a logit; kernels for different batch sizes differ by about a tenth of it
BATCH = 32

runner = lru_cache(maxsize=1)(load_runner)

SAMPLING = {
    "temperature": SamplingParams(max_tokens=TOKENS, temperature=0.8, ignore_eos=True, seed=17),
    "top-p": SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=0.9, ignore_eos=True, seed=18),
    "top-k and penalties": SamplingParams(
        max_tokens=TOKENS, temperature=1.1, top_k=50, repetition_penalty=1.2, frequency_penalty=0.4, ignore_eos=True,
        seed=19,
    ),
    "min-p": SamplingParams(max_tokens=TOKENS, temperature=1.3, min_p=0.05, ignore_eos=True, seed=20),
}  # fmt: skip


def run(
    model: ModelRunner, prompts: list[list[int]], params: list[SamplingParams], steps_ahead: int
) -> list[list[int]]:
    model.allocate(400, 16)
    rows = 2 * BATCH
    with torch.inference_mode():
        sampler = Sampler(rows, model.vocab_size, model.device)
    h = Harness(
        steps_ahead=steps_ahead,
        blocks=400,
        block_size=16,
        max_num_seqs=BATCH,
        budget=256,
        max_model_len=200,
        device=TorchDevice(model, sampler, rows, 16, 200),
        vocab_size=model.vocab_size,
        end_token_ids=(),
    )
    for handle, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
        h.submit(handle, prompt, how)
    h.drain()
    h.assert_all_returned()
    return [h.output.tokens[handle] for handle in range(len(prompts))]


def assert_same_or_rounding(
    model: ModelRunner, prompt: list[int], params: SamplingParams, one: list[int], other: list[int]
) -> None:
    """Equal; or, at the first difference, both candidates can be had from logits that are rounding apart."""
    if one == other:
        return
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    generator = torch.Generator().manual_seed(0)
    model.allocate(40, 16)
    context = prompt + one[:at]
    logits = model.forward(make_batch([context], [0], [list(range(1, 20))], 16, model.device, [len(context) - 1]))
    drawn = set()
    for _ in range(200):
        noisy = logits + ROUNDING * (2 * torch.rand(logits.shape, generator=generator) - 1)
        fresh = Sampler(1, model.vocab_size, model.device)
        fresh.admit(0, params, (), prompt, tuple(one[:at]))
        position = torch.tensor([len(context)])
        drawn.add(int(fresh.sample(noisy, fresh.row_set(np.zeros(1, np.int64)), position).tokens[0]))
    assert {one[at], other[at]} <= drawn, "the difference is more than rounding"


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_a_seeded_request_draws_the_same_tokens_in_any_company_and_at_every_k(name: str, smollm2_folder: Path) -> None:
    model, params = runner(smollm2_folder), SAMPLING[name]
    (prompt,) = random_prompts((40,), 49152, seed=5)
    (alone,) = run(model, [prompt], [params], 0)
    for steps_ahead in (1, 8):
        (ahead,) = run(model, [prompt], [params], steps_ahead)
        assert ahead == alone, "the batch is the same, so nothing may differ"
    company = random_prompts(tuple(5 + i for i in range(BATCH - 1)), 49152, seed=6)
    others = [SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True) for i in range(BATCH - 1)]
    among = run(model, [*company[:10], prompt, *company[10:]], [*others[:10], params, *others[10:]], 8)[10]
    assert_same_or_rounding(model, prompt, params, alone, among)
