"""Flags, environment and file make one configuration; errors name what is wrong."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from common.config import Config, EngineConfig, ModelConfig, ServerConfig
from common.options import OPTIONS, OptionError, add_serve_arguments, make_config, whole


def config(*argv: str, environment: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return make_config(parser.parse_args(argv), environment or {})


def test_nothing_given_is_the_default_configuration() -> None:
    assert config() == Config()


def test_every_option_sets_a_field_of_its_section() -> None:
    for option in OPTIONS:
        assert option.name in {field.name for field in fields(option.section)}


def test_every_field_that_a_user_may_set_has_an_option() -> None:
    named = {option.name for option in OPTIONS}
    all_fields = {field.name for section in (ModelConfig, EngineConfig, ServerConfig) for field in fields(section)}
    assert all_fields - named == {"model", "folder"}


def test_a_flag_beats_the_environment_and_that_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "stepahead.yaml"
    file.write_text("port: 1\nsteps-ahead: 2\nmax-num-seqs: 3\n")
    environment = {"STEPAHEAD_PORT": "10", "STEPAHEAD_STEPS_AHEAD": "20"}
    made = config("--config", str(file), "--port", "100", environment=environment)
    assert (made.server.port, made.engine.steps_ahead, made.engine.max_num_seqs) == (100, 20, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model: m\nserved-model-name: [a, b]\nasync-output: off\ndata-parallel-size: 2\n"),
        ("a.toml", 'model = "m"\nserved_model_name = ["a", "b"]\nasync_output = "off"\nengine_procs = 2\n'),
    ],
)
def test_a_file_may_be_yaml_or_toml(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    made = config("--config", str(tmp_path / name))
    assert made.model.model == "m"
    assert made.model.served_model_name == ("a", "b")
    assert made.engine.async_output is False
    assert made.engine.engine_procs == 2


def test_aliases_and_single_process() -> None:
    assert config("--data-parallel-size", "2").engine.engine_procs == 2
    assert config("--single-process").engine.engine_procs == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("4k", 4000), ("4Ki", 4096), ("1.5G", 1_500_000_000), ("2GI", 2 << 30), ("64MiB", 64 << 20)],
)
def test_whole_numbers_may_have_a_unit(text: str, value: int) -> None:
    assert whole(1)(text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "0", "-1", "nan", "1e3", "0.0001k", "5b", True])
def test_what_is_no_whole_number_in_range_is_refused(text: object) -> None:
    with pytest.raises(OptionError, match="whole number from 1"):
        whole(1)(text)


def test_errors_name_the_flag_the_variable_or_the_key(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^--port must be .* from 0 to 65535"):
        config("--port", "70000")
    with pytest.raises(OptionError, match=r"^STEPAHEAD_DTYPE must be one of"):
        config(environment={"STEPAHEAD_DTYPE": "int3"})
    file = tmp_path / "a.yaml"
    file.write_text("shutdown-timeout: -1\n")
    with pytest.raises(OptionError, match=r"^shutdown_timeout in .*a\.yaml must be a number of seconds"):
        config("--config", str(file))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "no_such_setting: 1\n"])
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(OptionError, match=r"a\.yaml"):
        config("--config", str(file))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(OptionError, match="No such file"):
        config("--config", "/nowhere.yaml")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="--max-num-batched-tokens"):
        config("--max-num-batched-tokens", "10", "--max-num-seqs", "11")
    with pytest.raises(OptionError, match="--api-server-count"):
        config("--single-process", "--api-server-count", "2")


def test_a_configuration_crosses_to_a_child_as_json() -> None:
    made = config("m", "--served-model-name", "a", "b", "--threads", "3", "--sse-keep-alive-interval", "0.5")
    assert Config.from_json(made.to_json()) == made


@pytest.mark.parametrize("name", ["owner/model", "model.gguf", "."])
def test_a_model_taken_for_a_name_is_noticed(name: str) -> None:
    with pytest.raises(OptionError, match="write MODEL before it"):
        config("--served-model-name", "foo", name)
    assert config(name, "--served-model-name", "foo").model.names == ("foo",)


@pytest.mark.parametrize(
    ("argv", "environment", "enabled"),
    [
        ((), {}, True),
        (("--enable-prefix-caching", "model"), {}, True),
        (("--no-enable-prefix-caching", "model"), {}, False),
        ((), {"STEPAHEAD_ENABLE_PREFIX_CACHING": "off"}, False),
        (("--enable-prefix-caching",), {"STEPAHEAD_ENABLE_PREFIX_CACHING": "off"}, True),
    ],
)
def test_a_switch_takes_no_value_on_the_command_line(
    argv: tuple[str, ...], environment: dict[str, str], enabled: bool
) -> None:
    made = config(*argv, environment=environment)
    assert made.engine.enable_prefix_caching is enabled
    assert made.model.model == ("model" if "model" in argv else ModelConfig().model)
