"""A seeded request draws the same tokens alone, in a batch of 32, at every K, and with drafts, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from engine.devices.drafts import Drafts
from engine.devices.torch_device import TorchDevice
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.harness import Harness
from tests.engine.model.driver import load_runner, random_prompts
from tests.models import ZOO_VOCABULARY

TOKENS = 24
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
    model: ModelRunner,
    prompts: list[list[int]],
    params: list[SamplingParams],
    steps_ahead: int,
    drafts: Drafts | None = None,
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
        device=TorchDevice(model, sampler, rows, 16, 200, drafts),
        vocab_size=model.vocab_size,
        end_token_ids=(),
    )
    for handle, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
        h.submit(handle, prompt, how)
    h.drain()
    h.assert_all_returned()
    if drafts is not None:
        h.loop._stats_due = 0
        h.abort(99)
        h.tick_loop()
        assert h.output.last_stats is not None
        counters = h.output.last_stats.counters
        assert 0 <= counters["accepted_draft_tokens"] <= counters["draft_tokens"]
        assert counters["draft_tokens"] or any(how.repetition_penalty != 1 for how in params), "nothing was drafted"
    return [h.output.tokens[handle] for handle in range(len(prompts))]


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
    assert among == alone, "on a tape not even rounding depends on the batch"


@pytest.mark.parametrize("name", [*sorted(SAMPLING), "greedy"])
def test_drafts_change_no_token(name: str, smollm2_folder: Path) -> None:
    model = runner(smollm2_folder)
    params = SAMPLING.get(name, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    (piece,) = random_prompts((12,), 49152, seed=7)
    prompts, how = [piece * 5, piece * 2 + piece[:3], piece], [params] * 3
    eager = Drafts(2 * BATCH, 200, 4, np.linspace(1.0, 1.01, 17))
    plain = run(model, prompts, how, 8)
    assert run(model, prompts, how, 8, eager) == plain


@pytest.mark.parametrize("family", ["gpt2", "cohere", "mixtral", "gpt_oss"])
def test_drafts_change_no_token_of_a_family_without_a_tape(family: str, zoo_folder: Callable[[str], Path]) -> None:
    model = runner(zoo_folder(family))
    favoured = ((5, 60.0), (6, 60.0), (7, 60.0))  # random models repeat nothing by themselves
    params = SamplingParams(max_tokens=TOKENS, temperature=2.0, ignore_eos=True, seed=3, logit_bias=favoured)
    (piece,) = random_prompts((12,), ZOO_VOCABULARY, seed=7)
    prompts, how = [piece * 5, piece * 2 + piece[:3], piece], [params] * 3
    eager = Drafts(2 * BATCH, 200, 4, np.linspace(1.0, 1.01, 17))
    assert run(model, prompts, how, 8, eager) == run(model, prompts, how, 8)
