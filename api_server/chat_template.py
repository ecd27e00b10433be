"""A model's chat template: Jinja, in a sandbox, with what Hugging Face gives templates."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api_server.errors import BadRequestError
from api_server.tokenizer import read_config

Message = dict[str, Any]

RESERVED = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class TemplateRefusalError(Exception):
    """Said by a template itself, through `raise_exception`."""


class ChatTemplate:
    """Turns messages into a prompt."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """`variables` are the special tokens by name. Raises ValueError when `source` is not a template."""
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateError as e:
            raise ValueError(f"the chat template is not valid: {e}") from e
        self._variables = variables
        self._knows_developer = "developer" in source

    @classmethod
    def load(cls, choice: str | None, folder: Path, variables: dict[str, str]) -> ChatTemplate | None:
        """By --chat-template (a file or the template itself), else the model's own; None when it has none.

        Raises ValueError naming the flag.
        """
        if choice is None:
            source = _of_model(folder)
            return None if source is None else cls(source, variables)
        try:
            return cls(_of_flag(choice), variables)
        except ValueError as e:
            raise ValueError(f"--chat-template: {e}") from e

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `BadRequestError` with what the template has against these messages."""
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **(variables or {})},
            )
        except TemplateRefusalError as e:
            raise BadRequestError(f"The chat template refuses these messages: {e}", param="messages") from e
        except Exception as e:  # a template is a program; whatever it stumbles over are these messages
            raise BadRequestError(
                f"The chat template fails on these messages: {type(e).__name__}: {e}", param="messages"
            ) from e
        return _cut_after(text, messages[-1]["content"]) if continue_final_message else text


def _cut_after(text: str, content: Any) -> str:
    """`text` up to the end of the last message's content, so that the model goes on writing it."""
    content = content.strip() if isinstance(content, str) else ""
    at = text.rfind(content) if content else -1
    if at < 0:
        raise BadRequestError(
            "continue_final_message: the last message has no content that the chat template shows as it is.",
            param="continue_final_message",
        )
    return text[: at + len(content)]


def _of_model(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = read_config(folder).get("chat_template")
    if isinstance(found, list):  # named templates
        by_name = {item["name"]: item["template"] for item in found}
        found = by_name.get("default", next(iter(by_name.values()), None))
    return found if isinstance(found, str) else None


def _of_flag(choice: str) -> str:
    if "{" in choice or "\n" in choice:  # no path that anybody has; and no template is without
        return choice
    path = Path(choice)
    if not path.is_file():
        raise ValueError(f"{choice} is neither a file nor a template")
    return path.read_text(encoding="utf-8")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()
