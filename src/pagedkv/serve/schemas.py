"""The bodies of OpenAI's requests, with vLLM's additions. What is not served is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagedkv.engine.params import MAX_LOGPROBS, MAX_N
from pagedkv.errors import InvalidRequestError
from pagedkv.serve.messages import Namespace

MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class StreamOptions(_Body):
    """`include_usage`: end the stream with a chunk that counts the tokens."""

    include_usage: bool = False


class JsonSchema(_Body):
    """A schema that the answer follows."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(_Body):
    """Plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """The schema that the answer follows, as text; None for plain text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError("response_format: json_schema goes with type json_schema, and only with it")
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class _Common(_Body):
    """What both kinds of request may ask for. Limits of numbers are those of SamplingParams."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None

    def schema_text(self) -> str | None:
        """The JSON schema that the answer follows, as text."""
        return None

    def sampling(self, max_tokens: int, logprobs: int | None) -> dict[str, Any]:
        """The fields of SamplingParams."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "ignore_eos", "include_stop_str_in_output",
            "skip_special_tokens",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return {
            **fields,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "logit_bias": _bias(self.logit_bias),
            "json_schema": self.schema_text(),
        }


class CompletionRequest(_Common):
    """POST /v1/completions. A prompt is a text or token ids; several answer as choices, one after the other."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt or many, as a list."""
        if self.best_of not in (None, 1) and self.best_of != self.n:
            raise InvalidRequestError(f"best_of is {self.best_of}; choosing among answers is not served: use n")
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo with logprobs is not served: log-probabilities of prompts are not computed")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"{len(self.prompt)} prompts in one request; at most {MAX_PROMPTS}")
        return self.prompt


class ContentPart(_Body):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class FunctionDefinition(_Body):
    """A function that the model may call. `strict` is always so: arguments follow the schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(_Body):
    """Which function was called, and with what: JSON, as text."""

    name: FunctionName
    arguments: str

    def parsed(self) -> Any:
        """The arguments as chat templates want them: an object where they are one."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


class MadeCall(_Body):
    """A call that the model has made in an earlier turn."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChosenFunction(_Body):
    """The name of the one function to call."""

    name: FunctionName


class ChosenTool(_Body):
    """The one tool to call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatMessage(_Body):
    """One turn. Fields that answers carry besides (`refusal` and so on) may come back as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def turn(self) -> dict[str, Any]:
        """As chat templates want it."""
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError(f"a message of role {self.role!r} has no content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequestError("tool_call_id goes with role tool, and only with it")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError("tool_calls go with role assistant only")
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": f.name, "arguments": f.parsed()}}
                for call in self.tool_calls
                for f in [call.function]
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
            if self.name is not None:
                turn["name"] = self.name
        return turn


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True

    def schema_text(self) -> str | None:
        """The JSON schema that the answer follows, as text."""
        return None if self.response_format is None else self.response_format.schema_text()

    def offered(self) -> list[ToolDefinition]:
        """The tools that the model may call."""
        tools = {tool.function.name: tool for tool in self.tools or ()}
        if len(tools) < len(self.tools or ()):
            raise InvalidRequestError("two tools have one name")
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            if name not in tools:
                raise InvalidRequestError(f"tool_choice is {name!r}, which is not among the tools")
            return [tools[name]]
        if self.tool_choice == "required" and not tools:
            raise InvalidRequestError("tool_choice is required, but there are no tools")
        if tools and self.tool_choice != "none" and self.schema_text() is not None:
            raise InvalidRequestError("tools and response_format cannot be enforced together")
        return [] if self.tool_choice == "none" else list(tools.values())

    @property
    def must_call(self) -> bool:
        """Has the model to call a tool?"""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    def wanted_logprobs(self) -> int | None:
        """How many log-probabilities per token; None for none."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Body):
    """POST /tokenize: a text, or a conversation in the model's chat format."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class ResetRequest(_Body):
    """POST /v1/cache/reset: what was computed under one cache_salt (null is one), of one tenant if there are some."""

    cache_salt: str | None = None
    tenant: str | None = None

    @property
    def namespace(self) -> Namespace:
        """Where that is shared."""
        return self.cache_salt if self.tenant is None else (self.tenant, self.cache_salt)


class ResizeRequest(_Body):
    """POST /v1/pool/resize."""

    num_pages: Annotated[int, Field(ge=1, lt=2**31)]


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are texts; token ids are numbers."""
    if bias is None:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequestError("the keys of logit_bias are token ids, as texts of digits") from None
