"""Command-line options as a table; the same settings from the environment (STEPAHEAD_…) and from a file.

What is nearest wins: flag, then environment, then file, then default.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from common.config import Config, EngineConfig, ModelConfig, ServerConfig

ENVIRONMENT_PREFIX = "STEPAHEAD_"


class OptionError(ValueError):
    """A setting that cannot be used; the text names it and the allowed range."""


Parse = Callable[[Any], Any]


def whole(low: int, high: int | None = None) -> Parse:
    """A whole number in a range; `4k`, `2M`, `1GB` count in thousands, `4Ki`, `2Mi`, `1GiB` in powers of 1,024."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    wanted = f"a whole number from {low}{'' if high is None else f' to {high}'}"

    def parse(value: Any) -> int:
        text = str(value).strip().lower()
        if text.endswith(tuple(f"{unit}b" for unit in units)):
            text = text[:-1]
        unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(text[: len(text) - len(unit)]) * units[unit] if unit else int(text)
        except ValueError:
            raise OptionError(f"must be {wanted}, not {value!r}") from None
        if number != int(number) or number < low or (high is not None and number > high):
            raise OptionError(f"must be {wanted}, not {value!r}")
        return int(number)

    return parse


def seconds(low: float) -> Parse:
    """A finite number of seconds."""

    def parse(value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not low <= number < float("inf") or isinstance(value, bool):
            raise OptionError(f"must be a number of seconds from {low:g}, not {value!r}")
        return number

    return parse


def choice(*allowed: str) -> Parse:
    """One of a few words. YAML reads a bare on or off as a boolean; it is taken as the word."""

    def parse(value: Any) -> str:
        text = {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        if text not in allowed:
            raise OptionError(f"must be one of {', '.join(allowed)}, not {value!r}")
        return text

    return parse


def on_off(value: Any) -> bool:
    return bool(choice("on", "off")(value) == "on")


def words(value: Any) -> tuple[str, ...]:
    """One name or several."""
    names = tuple(str(item) for item in value) if isinstance(value, list | tuple) else tuple(str(value).split(","))
    if not all(names):
        raise OptionError("must be one name or several, none empty")
    return names


def text(value: Any) -> str:
    return str(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. Its default is its field's."""

    flag: str
    section: type
    parse: Parse
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str = "N"
    field: str = ""
    several: bool = False
    switch: bool = False  # on the command line the flag alone is on, and with `no-` before its name it is off

    @property
    def name(self) -> str:
        return self.field or self.flag.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> Any:
        value = next(field.default for field in fields(self.section) if field.name == self.name)
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


_M, _E, _S = ModelConfig, EngineConfig, ServerConfig
GROUPS = {_M: "model", _S: "server", _E: "engine"}

OPTIONS: tuple[Option, ...] = (
    Option("--served-model-name", _M, words, "names the model answers to; the first is reported", metavar="NAME",
           several=True),
    Option("--revision", _M, text, "branch, tag or commit on the hub", metavar="REV"),
    Option("--download-dir", _M, text, "where hub models are kept (default: the hub's own cache)", metavar="DIR"),
    Option("--dtype", _M, choice("auto", "float32", "bfloat16", "float16"), "the weights are stored in; auto: 16 bits",
           metavar="TYPE"),
    Option("--quantization", _M, choice("none", "int8", "int4"), "of the linear layers' weights, done while loading",
           metavar="FORMAT"),
    Option("--max-model-len", _M, whole(1), "context length in tokens (default: the model's)"),
    Option("--chat-template", _M, text, "a file, or the template itself (default: the model's)", metavar="TEMPLATE"),
    Option("--generation-config", _M, text, "where unset sampling fields come from: auto (the model's), vllm "
           "(neutral), or a folder", metavar="SOURCE"),
    Option("--seed", _M, whole(0, 2**63 - 1), "seeds the draws of requests that give no seed"),
    Option("--host", _S, text, "address to listen on", metavar="ADDRESS"),
    Option("--port", _S, whole(0, 65535), "port to listen on; 0 takes a free one"),
    Option("--api-server-count", _S, whole(1, 64), "API processes on the port; metrics and limits are each one's own"),
    Option("--max-num-queued-reqs", _S, whole(1), "requests that may wait for their first token; beyond: 503"),
    Option("--max-num-queued-tokens", _S, whole(1), "prompt tokens that may wait; beyond: 503"),
    Option("--max-body-bytes", _S, whole(1024), "largest request body; beyond: 413"),
    Option("--sse-keep-alive-interval", _S, seconds(0), "comment lines while a stream waits; 0 is off",
           metavar="SECONDS"),
    Option("--shutdown-timeout", _S, seconds(0), "for open requests to finish after SIGTERM", metavar="SECONDS"),
    Option("--log-level", _S, choice("debug", "info", "warning", "error"), "of every process", metavar="LEVEL"),
    Option("--engine-procs", _E, whole(0, 64), "engine processes; 0 runs the engine inside the API process",
           aliases=("--data-parallel-size",)),
    Option("--device", _E, choice("auto", "cpu"), "what the model runs on; auto is the CPU", metavar="DEVICE"),
    Option("--steps-ahead", _E, whole(0, 64), "decode steps a plan covers; 0 is the synchronous schedule",
           metavar="K"),
    Option("--async-output", _E, on_off, "on: detokenize on a thread of its own; off: in the loop", metavar="on|off"),
    Option("--max-num-seqs", _E, whole(1, 4096), "requests that run at once"),
    Option("--max-num-batched-tokens", _E, whole(1, 1 << 20), "tokens a step"),
    Option("--block-size", _E, whole(1, 256), "tokens a KV-cache block"),
    Option("--enable-prefix-caching", _E, on_off, "requests that begin alike share what was computed of that, if their "
           "`cache_salt` is the same", metavar="or `--no-enable-prefix-caching`", switch=True),
    Option("--batch-invariant", _E, on_off, "refuse a model whose tokens would depend on what else is in the batch; "
           "costs nothing beyond that", metavar="or `--no-batch-invariant`", switch=True),
    Option("--kv-cache-memory-bytes", _E, whole(1 << 20), "memory of the KV cache (default: a share of what is free)",
           aliases=("--kv-cache-memory",)),
    Option("--kv-cache-dtype", _E, choice("auto", "float32", "bfloat16", "float16"), "keys and values are stored in; "
           "auto: float16, or float32 with float32 weights", metavar="TYPE"),
    Option("--threads", _E, whole(1, 1024), "threads of the model's operators (default: the cores)"),
    Option("--num-speculative-tokens", _E, whole(0, 32), "drafted a step from what the context repeats, where it "
           "pays; the output stays the same; 0 is off"),
    Option("--model-impl", _E, choice("auto", "transformers"), "auto: the fastest form that is known of the model; "
           "transformers: its own modules", metavar="IMPL"),
    Option("--tensor-parallel-size", _E, whole(1, 1), "devices that share one model; only 1 so far"),
)  # fmt: skip


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `stepahead serve`, grouped, with their defaults."""
    parser.add_argument(
        "model",
        nargs="?",
        help=f"local folder, .gguf file or hub id (default: {ModelConfig().model}, which is embedded)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with the same settings")
    for section, title in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in (option for option in OPTIONS if option.section is section):
            shown = "" if option.default is None or option.default == () else f" (default: {option.default})"
            kind: dict[str, Any] = {"metavar": option.metavar} | ({"nargs": "+"} if option.several else {})
            if option.switch:
                kind = {"action": argparse.BooleanOptionalAction}
            group.add_argument(option.flag, *option.aliases, dest=option.name, help=option.help + shown, **kind)
        if section is EngineConfig:
            group.add_argument(
                "--single-process",
                action="store_const",
                const="0",
                dest="engine_procs",
                help="same as --engine-procs 0",
            )


def make_config(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration tree. Raises OptionError, naming the flag, variable or file key at fault."""
    environment = os.environ if environment is None else environment
    file = _read_file(arguments.config) if arguments.config else {}
    sections: dict[type, dict[str, Any]] = {ModelConfig: {}, EngineConfig: {}, ServerConfig: {}}
    for option in OPTIONS:
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        given = (
            (option.flag, getattr(arguments, option.name, None)),
            (variable, environment.get(variable) or None),
            (f"{option.name} in {arguments.config}", file.pop(option.name, None)),
        )
        for source, value in given:
            if value is not None:
                try:
                    sections[option.section][option.name] = option.parse(value)
                except OptionError as e:
                    raise OptionError(f"{source} {e}") from None
                break
    model = arguments.model or environment.get(ENVIRONMENT_PREFIX + "MODEL") or file.pop("model", None)
    if file.pop("model", None) is not None and model is None:
        raise OptionError("model must be a name")
    if file:
        raise OptionError(f"{arguments.config}: no such setting: {', '.join(sorted(file))}")
    if model is not None:
        sections[ModelConfig]["model"] = str(model)
    config = Config(
        ModelConfig(**sections[ModelConfig]),
        EngineConfig(**sections[EngineConfig]),
        ServerConfig(**sections[ServerConfig]),
    )
    _check(config)
    _check_swallowed(config, model)
    return config


def _check_swallowed(config: Config, model: str | None) -> None:
    """`--served-model-name NAME MODEL` takes both as names; serving the default model then would be a bad surprise."""
    for name in config.model.served_model_name if model is None else ():
        if "/" in name or name.endswith(".gguf") or Path(name).is_dir():
            raise OptionError(f"--served-model-name has taken {name!r} as a name: write MODEL before it")


def _check(config: Config) -> None:
    """What no single option can know."""
    engine, server = config.engine, config.server
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise OptionError(
            f"--max-num-batched-tokens ({engine.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({engine.max_num_seqs}): every running request takes one token a step"
        )
    if engine.engine_procs == 0 and server.api_server_count != 1:
        raise OptionError("--api-server-count must be 1 with --engine-procs 0: the engine runs inside the API process")


def _read_file(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        data = path.read_text()
        tree = tomllib.loads(data) if path.suffix == ".toml" else yaml.safe_load(data)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as e:
        raise OptionError(f"--config {name}: {' '.join(str(e).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise OptionError(f"--config {name}: must map settings to values")
    return _flatten({str(key).removeprefix("--").replace("-", "_"): value for key, value in tree.items()})


def _flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Aliases under their field's name."""
    names = {alias.removeprefix("--").replace("-", "_"): option.name for option in OPTIONS for alias in option.aliases}
    return {names.get(key, key): value for key, value in tree.items()}


def parse_serve(argv: Sequence[str], prog: str = "stepahead serve") -> Config:
    """What `argv` and the environment ask for. Exits with status 2 and a usage line on a wrong flag."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a language model over the OpenAI API: HTTP in one process, the model in another.",
        epilog=f"Every option is also {ENVIRONMENT_PREFIX}NAME in the environment and name in --config FILE.",
    )
    add_serve_arguments(parser)
    try:
        return make_config(parser.parse_args(argv))
    except OptionError as e:
        print(f"{prog}: error: {e}", file=sys.stderr)
        sys.exit(2)
