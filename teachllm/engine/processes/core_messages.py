"""Define the messages between an engine and its core over a socket.

Each message is a msgspec struct, packed as MessagePack: typed when it is read, and never code (no pickle). What the
client has to say it says in lists, one list per turn of its loop; the core sends one message per step. A request is
named by a number that is never used twice, so that what is still on its way for one that was aborted is not taken for
another's that got its id.
"""

from __future__ import annotations

import msgspec

from teachllm.config import EngineConfig
from teachllm.core.scheduler_output import TokenLogprobs
from teachllm.distributed.lockstep import LockstepEnd
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.engine.observability.stats import StepStats
from teachllm.models.model_config import ModelConfig
from teachllm.sampling_params import SamplingParams
from teachllm.startup_progress import StartupStage


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One of the below; its name goes with it."""


# -- to the core -------------------------------------------------------------------------------------------


class Start(Message, frozen=True):
    """Load the model, as replica number `replica`. With `traces`, every line of the trace is told. Replicas that share
    experts are told where their ranks meet, as `Rendezvous` says it, and have an end of the lockstep each."""

    config: EngineConfig
    traces: bool
    replica: int
    rendezvous: Rendezvous | None = None
    lockstep: LockstepEnd | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the process inherits."""
        listener = None if self.rendezvous is None else self.rendezvous.listener
        steps = () if self.lockstep is None else self.lockstep.descriptors
        return steps if listener is None else (listener, *steps)


class Add(Message, frozen=True):
    """Queue a request. `prompt` holds its ids, 8 bytes each in the machine's order; the rest as in `Request`.

    What may be long is None where it is that of the request before, another completion of the same prompt: they share
    it on either side.
    """

    number: int
    request_id: str
    prompt: bytes | None
    sampling_params: SamplingParams | None
    arrival_time: float
    priority: int
    cache_keys: tuple[str, ...]
    group: str | None
    child_index: int
    seed: int
    bad_word_token_ids: tuple[tuple[int, ...], ...] | None
    eos_token_ids: frozenset[int]


class Finish(Message, frozen=True):
    """End a request, for a `FinishReason`."""

    number: int
    reason: str
    stop_reason: str | int | None


class ResetPrefixCache(Message, frozen=True):
    """Forget what no request holds."""


class Close(Message, frozen=True):
    """End the process."""


# -- from the core -----------------------------------------------------------------------------------------


class Loading(Message, frozen=True):
    """How far the start has come: the arguments of a `StartupProgress`."""

    stage: StartupStage
    done: int
    total: int


class Ready(Message, frozen=True):
    """The model is loaded; the configuration as resolved for it."""

    config: EngineConfig
    model_config: ModelConfig
    num_blocks: int


class Refused(Message, frozen=True):
    """The settings or the checkpoint are refused, or loading failed (`is_fault`); the process ends."""

    error: str
    is_fault: bool


class Update(msgspec.Struct, array_like=True, frozen=True):
    """Tell what a step changed for one request, in the fields of `RequestUpdate` and `Request`."""

    number: int
    new_token_ids: list[int]
    num_drafted: int
    num_accepted: int
    start: int
    num_cached_tokens: int
    num_preemptions: int
    first_scheduled_time: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None


class Stepped(Message, frozen=True):
    """One step's updates and figures, and the lines of the trace since the last message."""

    updates: list[Update]
    stats: StepStats
    lines: list[str]


class Failed(Message, frozen=True):
    """A step failed, and with it ended the requests that it has."""

    error: str
    numbers: list[int]


class Died(Message, frozen=True):
    """Tell that a worker has died; the process ends."""

    error: str


ToCore = Start | Add | Finish | ResetPrefixCache | Close
FromCore = Loading | Ready | Refused | Stepped | Failed | Died


encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(list[ToCore]).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
