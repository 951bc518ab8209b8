"""What a client may ask: the bodies of all requests, with the range of every field.

OpenAI's fields and vLLM's further ones, under their names; for a field that is not here see `other_fields.py`. Null is
the same as absent. These classes are the OpenAPI schema, too, so a limit is written here if it can be.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

from teachllm.sampling_params import PARAMETERS, Bounds, SamplingParams
from teachllm.server.openai.messages import STRICT, Messages, Tool, ToolChoice
from teachllm.server.openai.other_fields import check_other_fields

MAX_N = 128
_INT32 = 2**31 - 1
_MAX_BIASES = 4096


def _whole(value: object) -> object:
    """To JSON 3.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: object) -> object:
    """The same of a list, which is long where it holds token ids."""
    return [_whole(each) for each in value] if isinstance(value, list) and float in set(map(type, value)) else value


def _check_size(value: object) -> object:
    """Refuse a mapping by its length before each item of it is looked at: every wrong one makes an error of its own."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"a mapping of {len(value)} entries has more than the {_MAX_BIASES} that it may have")
    return value


_WHOLE, _ALL_WHOLE = BeforeValidator(_whole), BeforeValidator(_all_whole)
# The upper limits of these depend on the model: `openapi.py` fills them in once it is loaded.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=_INT32)])
MaxTokens = TypeAliasType("MaxTokens", Annotated[int, Field(ge=1, le=_INT32), _WHOLE])
NumLogprobs = TypeAliasType("NumLogprobs", Annotated[int, Field(ge=-1, le=_INT32), _WHOLE])  # -1: the whole vocabulary

_PromptLength = Annotated[Literal[-1] | Annotated[int, Field(ge=1, le=_INT32)], _WHOLE]  # -1: as long as fits
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), _ALL_WHOLE]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[_TokenIdText, _Bias],
    BeforeValidator(_check_size),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": _MAX_BIASES,
        }
    ),
]


class StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool | None = Field(None, description="A last chunk, without choices, tells the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk tells the usage so far.")


class JsonSchema(BaseModel):
    model_config = STRICT
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    # `schema` is a method of every pydantic model.
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    model_config = STRICT
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = STRICT
    type: Literal["json_object"]


class JsonSchemaFormat(BaseModel):
    model_config = STRICT
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_GIVEN: dict[str, Any] = {"not": {"enum": [None, False]}}


class StructuredOutputs(BaseModel):
    """Exactly one of these."""

    model_config = ConfigDict(
        **STRICT, json_schema_extra={"oneOf": [{"required": [name], "properties": {name: _GIVEN}} for name in _KINDS]}
    )
    # `json` is a method of every pydantic model.
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    structural_tag: Text | None = None


class RequestBody(BaseModel):
    """A body whose other fields are looked at, too: what would change the answer is not ignored."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _look_at_others(cls, content: Any) -> Any:
        check_other_fields(content, frozenset(cls.model_fields))
        return content


# Ranges that are narrower here than the engine's.
_NARROWER = {
    "temperature": Bounds(ge=0, le=100),
    "repetition_penalty": Bounds(ge=0.01, le=100),
}
_NOT_PLAIN = ("n", "detokenize")  # declared below; not offered, since an answer is text


def _plain_fields() -> dict[str, Any]:
    """Return a field for each of SamplingParams that is just a number or a flag, with the range that it has there."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(SamplingParams).items():
        if kind in (int, float, bool) and name not in _NOT_PLAIN:
            bounds = _NARROWER.get(name, PARAMETERS[name].bounds)
            plain: Any = kind
            if bounds is not None:
                highest = bounds.le if bounds.le is not None or kind is float else _INT32
                below = bounds.lt if bounds.lt != math.inf else None  # which no schema can say
                plain = Annotated[kind, Field(ge=bounds.ge, gt=bounds.gt, le=highest, lt=below)]
            found[name] = (Annotated[plain, _WHOLE] if kind is int else plain) | None, None
    return found


if TYPE_CHECKING:
    _PlainFields = RequestBody
else:
    _PlainFields = create_model("_PlainFields", __base__=RequestBody, **_plain_fields())


class Sampling(_PlainFields):
    """What both kinds of completion share: SamplingParams' numbers and flags, and what is more than that."""

    model: Text | None = Field(None, description="One of those that /v1/models lists; the first if absent.")
    n: Annotated[int, Field(ge=1, le=MAX_N), _WHOLE] | None = Field(None, description="Completions of each prompt.")
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), _WHOLE] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=128, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True), _ALL_WHOLE] | None = None
    bad_words: Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: NumLogprobs | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    priority: Annotated[int, Field(ge=-_INT32, le=_INT32), _WHOLE] | None = Field(
        None, description="Lower goes first; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Cached prompts are shared only between requests of the same salt."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='Log-probabilities name tokens "token_id:17".')
    truncate_prompt_tokens: _PromptLength | None = Field(
        None, description="The prompt's last so many tokens count; -1: as many as fit."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Annotated[
        Text | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=2048, fail_fast=True)],
        Field(union_mode="left_to_right", description="Text, token ids, or a list of either."),
    ]
    max_tokens: MaxTokens | SkipJsonSchema[Literal[0]] | None = Field(
        None, description="16 if absent; 0 with `echo` scores the prompt."
    )
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    add_special_tokens: bool | None = None


class ChatOptions(BaseModel):
    """How messages become a prompt."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    add_special_tokens: bool | None = Field(None, description="Around what the template makes, too.")
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = Field(
        None, description="For templates that know of them."
    )
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="For templates that know of it."
    )
    chat_template: Text | None = Field(None, description="Jinja; needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(Sampling, ChatOptions):
    """The body of /v1/chat/completions."""

    echo: bool | None = Field(None, description="The answer begins with the last message, if that is the assistant's.")
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeTextRequest(RequestBody):
    truncate_prompt_tokens: _PromptLength | None = None
    model: Text | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestBody, ChatOptions):
    truncate_prompt_tokens: _PromptLength | None = None
    model: Text | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), _ALL_WHOLE]


class LoadLoraRequest(RequestBody):
    lora_name: Text
    lora_path: Text
    base_model_name: Text | None = None
    load_inplace: bool | None = None


class UnloadLoraRequest(RequestBody):
    lora_name: Text
    lora_int_id: Annotated[int, Field(ge=1, le=_INT32), _WHOLE] | None = None
