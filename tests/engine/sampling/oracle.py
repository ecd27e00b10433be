"""A slow, plain sampler: one row, sorting, no tensors but for the noise. What the real one is checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.sampling import SamplingParams
from engine.sampling.noise import exponentials, row_keys


@dataclass
class Choice:
    """What may be drawn, how likely each is, what is drawn, and whether rounding could have made it otherwise."""

    probabilities: dict[int, float]
    token: int
    ambiguous: bool = False


def adjust(
    logits: Sequence[float], params: SamplingParams, ends: Sequence[int], prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Allowed tokens, min_tokens, bias, penalties."""
    z = list(logits)
    if params.allowed_token_ids:
        z = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(z)]
    if len(output) < params.min_tokens:
        z = [-math.inf if token in ends else value for token, value in enumerate(z)]
    for token, value in params.logit_bias:
        z[token] += value
    for token in {*prompt, *output}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return z


def choose(z: Sequence[float], params: SamplingParams, position: int) -> Choice:
    """The token drawn from adjusted logits."""
    best = max(z)
    if best == -math.inf:
        token = min(params.allowed_token_ids, default=0)
        return Choice({token: 1.0}, token)
    if params.temperature < 1e-5:
        return Choice({z.index(best): 1.0}, z.index(best))
    weights = {token: math.exp((value - best) / params.temperature) for token, value in enumerate(z)}
    weights, unsure_p = _min_p(weights, params.min_p)
    weights = _top_k(weights, z, params.top_k)
    weights, unsure_m = _top_p(weights, params.top_p)
    total = sum(weights.values())
    noise = exponentials(row_keys(torch.tensor([params.seed]), torch.tensor([position])), len(z))[0].tolist()
    times = {token: noise[token] / weight if weight > 0 else math.inf for token, weight in weights.items()}
    first, *rest = sorted(times.values())
    close = bool(rest) and rest[0] < first * (1 + 1e-4)  # float32 arithmetic on the logits may tip it
    token = min(times, key=lambda token: (times[token], token))
    return Choice({t: w / total for t, w in weights.items()}, token, close or unsure_p or unsure_m)


def _min_p(weights: dict[int, float], min_p: float) -> tuple[dict[int, float], bool]:
    unsure = any(min_p > 0 and math.isclose(weight, min_p, rel_tol=1e-4) for weight in weights.values())
    return {token: weight for token, weight in weights.items() if weight >= min_p}, unsure


def _top_k(weights: dict[int, float], z: Sequence[float], top_k: int) -> dict[int, float]:
    if not 0 < top_k < len(z):
        return weights
    cut = sorted(z, reverse=True)[top_k - 1]
    return {token: weight for token, weight in weights.items() if z[token] >= cut}


def _top_p(weights: dict[int, float], top_p: float) -> tuple[dict[int, float], bool]:
    if top_p >= 1:
        return weights, False
    target = top_p * sum(weights.values())
    mass, unsure = 0.0, False
    for cut in sorted(set(weights.values()), reverse=True):
        mass += sum(weight for weight in weights.values() if weight == cut)
        unsure |= math.isclose(mass, target, rel_tol=1e-4)
        if mass >= target:
            break
    unsure |= any(weight != cut and math.isclose(weight, cut, rel_tol=1e-6) for weight in weights.values())
    return {token: weight for token, weight in weights.items() if weight >= cut}, unsure
