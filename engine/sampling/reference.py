"""The sampler's operations in plain torch: for any device, never synchronizing, and what `kernels` must agree with."""

from __future__ import annotations

import torch

from engine.sampling.logprobs import FLOOR, Scores
from engine.sampling.noise import exponentials, row_keys
from engine.sampling.rows import Draws, Penalties

MAX_ELEMENTS = 1 << 23  # logits worked on at a time: a float64 copy of them is 64 MiB


class ReferenceOperations:
    """Implements `operations.Operations`."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=1)

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, draws: Draws, positions: torch.Tensor) -> None:
        best = logits.gather(1, tokens[:, None])
        for part in _parts(len(draws.places), logits.shape[1]):
            places = draws.places[part]
            drawn = _draw(logits[places], best[places].double(), draws, part, positions[places])
            tokens[places] = torch.where(best[places, 0].isfinite(), drawn, tokens[places])

    def mask(self, logits: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> None:
        bits = (words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        logits[places] = torch.where(allowed, logits[places], -torch.inf)

    def penalize(
        self, logits: torch.Tensor, penalties: Penalties, in_prompt: torch.Tensor, output_counts: torch.Tensor
    ) -> None:
        for part in _parts(len(penalties.places), logits.shape[1]):
            places, slots = penalties.places[part], penalties.slots[part]
            counts = output_counts[slots]
            seen = in_prompt[slots] | (counts > 0)
            z = logits[places]
            repetition = torch.where(seen, penalties.repetition[part, None], 1.0)
            z = torch.where(z > 0, z / repetition, z * repetition)
            z -= penalties.frequency[part, None] * counts
            z -= penalties.presence[part, None] * (counts > 0)
            logits[places] = z

    def logprobs(self, logits: torch.Tensor, places: torch.Tensor, chosen: torch.Tensor, top: int) -> Scores:
        columns = []
        for part in _parts(len(places), logits.shape[1]):
            z = logits[places[part]]
            total = z.logsumexp(dim=1, keepdim=True)
            values, ids = _top(z, top)
            columns.append((_finite(z.gather(1, chosen[part, None]) - total)[:, 0], ids, _finite(values - total)))
        if not columns:
            columns.append((logits.new_empty(0), places.new_empty(0, top), logits.new_empty(0, top)))
        return Scores(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _parts(count: int, width: int) -> list[slice]:
    step = max(1, MAX_ELEMENTS // width)
    return [slice(start, start + step) for start in range(0, count, step)]


def _draw(z: torch.Tensor, best: torch.Tensor, draws: Draws, part: slice, positions: torch.Tensor) -> torch.Tensor:
    """An exponential race: the token with the smallest E / weight wins with a probability proportional to its weight.

    It is Gumbel-max seen through exp(−x): log weight − log E is log weight plus a Gumbel variate.
    """
    weights = ((z.double() - best) / draws.temperature[part, None]).exp()
    if draws.truncated:
        weights = weights * _kept(z, weights.float(), draws, part)
    noise = exponentials(row_keys(draws.seeds[part], positions), z.shape[1])
    return (noise / weights).argmin(dim=1)


def _kept(z: torch.Tensor, weights: torch.Tensor, draws: Draws, part: slice) -> torch.Tensor:
    """Which tokens min_p, then top_k, then top_p on the rest leave; those as likely as the last one kept are kept.

    weights: [m, V] float32, 1 for the likeliest.
    """
    top_p = draws.top_p[part, None]
    order = z.view(torch.int32)
    order = order ^ ((order >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    kept = order >= _threshold(order, torch.ones_like(weights), draws.top_k[part, None])
    kept &= weights >= draws.min_p[part, None].float()
    weights = torch.where(kept, weights, 0.0)
    order = weights.view(torch.int32)
    mass = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    return kept & ((order >= _threshold(order, weights, top_p * mass)) | (top_p >= 1))


def _threshold(order: torch.Tensor, measure: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The highest threshold at or above which lies at least `target` of the measure. By bisection: exact, no sort.

    [m, V] int32, [m, V] float32, [m, 1] → [m, 1] int64; the lowest integer where there is not as much.
    """
    low = torch.full_like(target, -(2**31), dtype=torch.int64)
    high = order.amax(dim=1, keepdim=True).long() + 1
    for _ in range(32):
        middle = (low + high) >> 1
        enough = torch.where(order >= middle, measure, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64) >= target
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return low


def _top(z: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = z.topk(count, dim=1).indices.sort(dim=1).values
    values, order = z.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=FLOOR, posinf=0.0, neginf=FLOOR).clamp(min=FLOOR)
