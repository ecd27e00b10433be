from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from api_server.generation_config import SamplingDefaults


def write(folder: Path, **tree: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(tree))
    return folder


def test_the_models_own_values_are_the_defaults_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = write(tmp_path, do_sample=False, temperature=0.6, top_k=20, top_p=0.9, eos_token_id=[1], max_new_tokens=99)
    defaults = SamplingDefaults.load("auto", folder)
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=99)
    assert "temperature 0.6, top_k 20, top_p 0.9, max_new_tokens 99" in caplog.text


def test_what_the_model_leaves_out_is_neutral_whatever_do_sample_says(tmp_path: Path) -> None:
    assert SamplingDefaults.load("auto", write(tmp_path, do_sample=False)) == SamplingDefaults()
    assert SamplingDefaults().temperature == 1.0


def test_neutral_defaults_can_be_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert SamplingDefaults.load("vllm", write(tmp_path, temperature=0.1)) == SamplingDefaults()
    assert "neutral" in caplog.text


def test_a_model_without_the_file_is_neutral_and_another_folder_may_bring_it(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert SamplingDefaults.load("auto", tmp_path) == SamplingDefaults()
    assert SamplingDefaults.load(str(write(other, min_p=0.1)), tmp_path).min_p == 0.1
    with pytest.raises(ValueError, match="--generation-config"):
        SamplingDefaults.load(str(tmp_path), other)


@pytest.mark.parametrize("value", [-1, "hot", True, None, 1e999, [1]])
def test_unusable_values_are_left_out(value: object, tmp_path: Path) -> None:
    assert SamplingDefaults.load("auto", write(tmp_path, temperature=value)) == SamplingDefaults()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_file_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        SamplingDefaults.load("auto", tmp_path)
