"""Fields that clients of OpenAI and vLLM know and that this server does not serve.

Silence would change what they asked for, so each is refused by name, unless its value asks for nothing. Known fields
that change nothing about the text (user, metadata, store, service_tier, prediction, …) are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from api_server.errors import BadRequestError

Harmless = Callable[[Any, Mapping[str, Any]], bool]


def _empty(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or value in ([], {}, "", False)


def _tools(value: Any, body: Mapping[str, Any]) -> bool:
    return not value or body.get("tool_choice") == "none"


def _tool_choice(value: Any, body: Mapping[str, Any]) -> bool:
    return value in (None, "none") or (value == "auto" and not body.get("tools"))


def _functions(value: Any, body: Mapping[str, Any]) -> bool:
    return not value or body.get("function_call") == "none"


def _function_call(value: Any, body: Mapping[str, Any]) -> bool:
    return value in (None, "none") or (value == "auto" and not body.get("functions"))


def _text_only(value: Any, body: Mapping[str, Any]) -> bool:
    return value in (None, [], ["text"])


def _only(*values: Any) -> Harmless:
    return lambda value, body: value in (None, *values)


UNSUPPORTED: dict[str, Harmless] = {
    # OpenAI
    "tools": _tools,
    "tool_choice": _tool_choice,
    "functions": _functions,
    "function_call": _function_call,
    "modalities": _text_only,
    "audio": _empty,
    "web_search_options": _empty,
    "verbosity": _only("medium"),
    "suffix": _empty,
    # vLLM and SGLang
    "structural_tag": _empty,
    "json_schema": _empty,
    "regex": _empty,
    "ebnf": _empty,
    "bad_words": _empty,
    "chat_template": _empty,
    "documents": _empty,
    "logits_processors": _empty,
    "use_beam_search": _empty,
    "length_penalty": _only(1),
    "prompt_embeds": _empty,
    "mm_processor_kwargs": _empty,
    "kv_transfer_params": _empty,
    "return_tokens_as_token_ids": _empty,
    "lora_path": _empty,
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises `BadRequestError` naming the first such field of `body`, the fields that its schema does not have."""
    for name in UNSUPPORTED.keys() & body.keys():
        if not UNSUPPORTED[name](body[name], body):
            raise BadRequestError(f"{name} is not supported by this server.", param=name, code="unsupported_parameter")
