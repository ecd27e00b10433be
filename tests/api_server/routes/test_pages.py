"""The chat page is whole, and asks nothing of other hosts."""

from __future__ import annotations

import re

import pytest

from tests.api_server.conftest import Client


@pytest.mark.parametrize(
    ("path", "kind"), [("/chat", "text/html"), ("/chat/chat.css", "text/css"), ("/chat/chat.js", "text/javascript")]
)
async def test_each_of_its_files_is_served_under_a_strict_policy(path: str, kind: str, client: Client) -> None:
    response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(?:https?:)?//[a-z]", response.text.replace("data:,", ""))


async def test_it_names_only_files_that_there_are(client: Client) -> None:
    page = (await client.get("/chat")).text
    for path in re.findall(r'(?:src|href)="(chat/[^"]+)"', page):
        assert (await client.get(f"/{path}")).status_code == 200


async def test_it_is_not_part_of_the_api(client: Client) -> None:
    assert "/chat" not in (await client.get("/openapi.json")).json()["paths"]
