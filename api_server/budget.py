"""How many tokens a request may have: prompt and output share the model's context."""

from __future__ import annotations

from api_server.errors import BadRequestError


def too_long(prompt_tokens: int, max_model_len: int, param: str, *, at_least: bool = False) -> BadRequestError:
    """The answer to a prompt that leaves no room for a token."""
    return BadRequestError(
        f"This model's maximum context length is {max_model_len} tokens; the prompt has "
        f"{'at least ' if at_least else ''}{prompt_tokens} tokens, and one more is needed for the output.",
        param=param,
        code="context_length_exceeded",
    )


def truncated(ids: list[int], keep: int | None, max_model_len: int, max_tokens: int | None) -> list[int]:
    """The last `keep` of `ids`; with -1, as many as leave room for the output. Raises `BadRequestError`."""
    if keep is None:
        return ids
    if keep > max_model_len:
        raise BadRequestError(
            f"truncate_prompt_tokens must be at most the model's context length, {max_model_len}, not {keep}.",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(max_model_len - (1 if max_tokens is None else max_tokens), 1)
    return ids[-keep:]


def output_tokens(
    prompt_tokens: int, max_model_len: int, field: str, requested: int | None, default: int | None, cap: int | None
) -> int:
    """How many tokens may be generated.

    requested: what `field` says. default: used without it, and None means the rest of the context. cap: the model's
    own `max_new_tokens`, which bounds both, as in vLLM. Raises `BadRequestError` with the figures when it does not fit.
    """
    room = max_model_len - prompt_tokens
    if room < min(1 if requested is None else requested, 1):
        raise too_long(prompt_tokens, max_model_len, "messages" if default is None else "prompt")
    if requested is not None and requested > room:
        raise BadRequestError(
            f"{field} must be at most {room}, not {requested}: this model's maximum context length is {max_model_len} "
            f"tokens and the prompt has {prompt_tokens}.",
            param=field,
            code="context_length_exceeded",
        )
    wanted = requested if requested is not None else default
    bounds = [bound for bound in (wanted, cap, room) if bound is not None]
    return min(bounds)
