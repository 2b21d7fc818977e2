"""The bodies of requests: what of OpenAI's is obeyed, what is ours, and what is refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leantune.data.examples import Message
from leantune.generate.sampling import Sampling
from leantune.serve.errors import RequestError

# Parameters of OpenAI that are not supported, each with the values besides null that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
_MOST_STOPS = 4  # OpenAI's limit


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Body):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn. `developer` is what newer clients call the system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_message(self) -> Message:
        """The turn as templates know it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Body):
    """include_usage: a last chunk counts the tokens."""

    include_usage: bool = False


class Request(_Body):
    """What chats and completions have in common. `user` and `metadata` are taken and have no effect."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Not OpenAI's:
    top_k: int | None = None
    strength: float | None = Field(default=None, allow_inf_nan=False)
    subspaces: list[str | int] | None = None
    generation: Literal["prompt", "all", "new"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for key in _NEUTRAL.keys() & body.keys():
            if body[key] is not None and body[key] not in _NEUTRAL[key]:
                raise RequestError(
                    f"{key}: {body[key]!r} is not supported here; leave it out",
                    param=key,
                    code="unsupported_parameter",
                )
        return {key: value for key, value in body.items() if key not in _NEUTRAL}

    @model_validator(mode="after")
    def _check_together(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; leave it out")
        if not all(self.stop_strings):
            raise ValueError("stop: an empty string would end every answer at once; leave it out")
        if len(self.stop_strings) > _MOST_STOPS:
            raise ValueError(f"stop: {len(self.stop_strings)} strings; expected at most {_MOST_STOPS}")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def asked_tokens(self) -> int | None:
        """How long the answer may be, if the client says so."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Greedy unless a temperature is given. Raises `ConfigError` for values that cannot be obeyed."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return Sampling(max_new_tokens, **{k: value for k, value in given.items() if value is not None})


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_conversation(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise ValueError(f"messages: the last turn is {self.messages[-1].role}'s; expected the user's")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """The body of POST /v1/completions: the prompt is continued as it is, without a template."""

    prompt: str
