"""The fields that chat completions and completions share, with their ranges, and what they become for the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from api_server.errors import BadRequestError
from api_server.generation_config import SamplingDefaults
from api_server.schemas.structured import StructuredRequest
from common.grammar import Grammar
from common.sampling import SamplingParams

MAX_STOPS = 16  # OpenAI's bound is 4
MAX_STOP_CHARS = 1_000
MAX_TOKEN_LIST = 1_024
MAX_SALT_CHARS = 1_024
INT64 = 2**63
SMALLEST_TOP_P = 1e-6  # stands for 0: only the likeliest token

T = TypeVar("T")

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_LIST, fail_fast=True)]

_STOP = f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
_IDS = f"a list of up to {MAX_TOKEN_LIST} token ids"


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="A last chunk with `usage` and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="`usage` so far in every chunk.")


class GenerationRequest(StructuredRequest):
    """What every request for generated text may say. Fields that it does not have stand in `model_extra`, unread."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="One of the served names; the first when left out.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128, description="Answers per prompt; 1 when left out.")
    best_of: int | None = Field(None, ge=1, le=128, description="Only as large as n.")
    user: str | None = None

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default: the model's, else 1.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 are off. Default: the model's, else off.")
    min_p: float | None = Field(None, ge=0, le=1, description="Default: the model's, else 0.")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Over prompt and output; 1 is none. Default: the model's, else 1."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Over output; 0 when left out.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Over output; 0 when left out.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None,
        max_length=MAX_TOKEN_LIST,
        description="Token id to what is added to its logit.",
        json_schema_extra={"allowed": f"an object of up to {MAX_TOKEN_LIST} token ids with numbers from -100 to 100"},
    )
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, json_schema_extra={"allowed": _IDS})
    seed: int | None = Field(
        None, ge=-INT64, lt=INT64, json_schema_extra={"allowed": "an integer of 64 bits"}, description="Any int64."
    )

    stop: StopText | StopTexts | None = Field(None, json_schema_extra={"allowed": _STOP})
    stop_token_ids: TokenIds | None = Field(None, json_schema_extra={"allowed": _IDS})
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="No end before so many tokens.")
    skip_special_tokens: bool | None = Field(None, description="True when left out.")

    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Logprobs of the prompt's tokens.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31, description="Keep only the last so many tokens; -1: as many as fit."
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs first; 0 when left out.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="Cached prefixes are shared only among requests with the same salt, or with none.",
        json_schema_extra={"allowed": f"a string of 1 to {MAX_SALT_CHARS} characters"},
    )
    request_id: str | None = Field(None, description="Becomes part of the answer's id.")
    return_token_ids: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
                raise ValueError(f"the key {key[:40]!r} is not a token id.")
        return bias

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.usage_in_stream and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, vocab_size: int) -> None:
        """What no field can say alone. Raises `BadRequestError`."""
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequestError("prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        if self.best_of is not None and self.best_of != self.count:
            raise BadRequestError(f"best_of must equal n, which is {self.count}.", param="best_of")
        if self.min_tokens and self.constraint() is not None:
            raise BadRequestError("min_tokens cannot be combined with a constraint of the output.", param="min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise BadRequestError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        for name, ids in (
            ("logit_bias", map(int, self.logit_bias or {})),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            check_vocabulary(name, ids, vocab_size)

    def sampling(
        self, defaults: SamplingDefaults, max_tokens: int, seed: int, choice: int, grammar: Grammar | None = None,
        **logprobs: int | None,
    ) -> SamplingParams:  # fmt: skip
        """What the engine obeys. `seed` is used where the client gave none; fields left out come from `defaults`.

        choice: which of the `n` of its prompt; each has a seed of its own.

        Raises `BadRequestError` when min_tokens cannot be reached.
        """
        if (self.min_tokens or 0) > max_tokens:
            raise BadRequestError(
                f"min_tokens must be at most the tokens that can be generated, {max_tokens}, not {self.min_tokens}.",
                param="min_tokens",
            )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_first(self.temperature, defaults.temperature),
            top_k=max(_first(self.top_k, defaults.top_k), 0),
            top_p=max(_first(self.top_p, defaults.top_p), SMALLEST_TOP_P),
            min_p=_first(self.min_p, defaults.min_p),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            seed=(_first(self.seed, seed) + choice) % INT64,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            grammar=grammar,
            **logprobs,
        )


def _first(value: T | None, default: T) -> T:
    return default if value is None else value


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises `BadRequestError` for a token id that the model does not have."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise BadRequestError(
            f"{name}: token id {largest} is not within the vocabulary, 0 to {vocab_size - 1}.", param=name
        )
