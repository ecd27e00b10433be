from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from api_server.chat_template import ChatTemplate, Message
from api_server.errors import BadRequestError

SIMPLE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[Message] | None = None, **options: Any) -> str:
    return ChatTemplate(source, VARIABLES).render(messages or HELLO, **options)


def test_messages_special_tokens_and_the_generation_prompt_are_rendered() -> None:
    assert render(SIMPLE) == "<s>[user]hello[/][assistant]"
    assert render(SIMPLE, add_generation_prompt=False) == "<s>[user]hello[/]"


def test_blocks_leave_no_whitespace_behind() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}")
        == "hello\n"
    )


def test_json_is_written_as_models_know_it() -> None:
    text = render("{{ {'b': '<é>', 'a': [1, none]} | tojson }}|{{ {'a': 1} | tojson(indent=2) }}")
    assert text == '{"b": "<é>", "a": [1, null]}|{\n  "a": 1\n}'


def test_loop_controls_the_generation_tag_and_the_date_are_known() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    assert re.fullmatch(r"hello\d{4}", render(source))


def test_what_a_template_refuses_is_a_bad_request_with_its_own_words() -> None:
    with pytest.raises(BadRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[7].content.x }}", "{{ messages + 1 }}"])
def test_what_a_template_stumbles_over_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(BadRequestError):
        render(source)


def test_a_developer_is_a_system_for_templates_that_do_not_know_the_role() -> None:
    messages: list[Message] = [{"role": "developer", "content": "x"}]
    assert "[system]x" in render(SIMPLE, messages)
    assert "[developer]x" in render(SIMPLE + "{# developer #}", messages)


def test_a_final_message_can_be_left_open() -> None:
    messages = [*HELLO, {"role": "assistant", "content": " the answer is "}]
    text = render(SIMPLE, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>[user]hello[/][assistant] the answer is"
    with pytest.raises(BadRequestError, match="continue_final_message"):
        render(SIMPLE, [{"role": "assistant", "content": ""}], continue_final_message=True)


def test_a_clients_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"


def test_the_model_brings_its_template_in_a_file_or_in_its_tokenizer_config(tmp_path: Path) -> None:
    assert ChatTemplate.load(None, tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    for found in (
        "from config",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from config"}],
    ):
        config.write_text(json.dumps({"chat_template": found}))
        template = ChatTemplate.load(None, tmp_path, {})
        assert template is not None
        assert template.render(HELLO) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    template = ChatTemplate.load(None, tmp_path, {})
    assert template is not None
    assert template.render(HELLO) == "from file"


def test_the_flag_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("mine {{ messages[0].content }}")
    for choice in (str(path), "mine {{ messages[0].content }}"):
        template = ChatTemplate.load(choice, tmp_path, {})
        assert template is not None
        assert template.render(HELLO) == "mine hello"


@pytest.mark.parametrize("choice", ["/no/such/file", "{% if %}"])
def test_a_wrong_flag_is_named(choice: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--chat-template"):
        ChatTemplate.load(choice, tmp_path, {})
