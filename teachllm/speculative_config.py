"""Configure speculation: the drafter, and how many tokens. The words are vLLM's `--speculative-config`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

METHODS = ("ngram", "draft_model", "eagle", "medusa", "custom")
_NEED_MODEL = ("draft_model", "eagle", "medusa")
_SYNONYMS = {"method": {"eagle3": "eagle"}, "rejection_sample_method": {"probabilistic": "standard"}}
_NOT_OURS = {  # other ways to verify, and why not
    "strict": "a draft that was drawn is accepted with probability min(1, p / q) here, which is lossless as well and "
    "accepts more",
    "block": "drafts are verified one after the other here",
}
_PROMPT_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
MAX_SPECULATIVE_TOKENS = 16
MAX_NODES = 63  # of a tree: with the newest token as many as an integer has bits
_UNSET: Any = None  # until `__post_init__` has filled it in


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    Attributes:
        method: "ngram" looks up where the last tokens stood before; "draft_model" asks a smaller model; "eagle" and
            "medusa" are heads on the model itself; "custom" is a drafter that was passed to the engine.
        num_speculative_tokens: tokens to draft one after the other, at most. Of a tree its depth; its number of nodes
            is taken, too, and becomes the depth.
        model: folder or hub id of the draft model, or of the heads; "teachlm-draft", "teachlm-eagle" and
            "teachlm-medusa" come with the package, and are what "teachlm" has where none is named.
        revision: branch, tag or commit of it on the hub.
        load_format: as the engine's, which it is if None.
        draft_tensor_parallel_size: 1, there is no other.
        prompt_lookup_max, prompt_lookup_min: "ngram" looks for as many of the last tokens, at most and at least: 4 and
            1, and where one is given that is beyond the other's default, the same number.
        speculative_token_tree: paths of a tree of drafts as a list in a string, "[(0,), (1,), (0, 0)]": the best and
            the second-best next token, and what follows the best. None is a chain.
        adaptive: the length follows load and measured acceptance, down to zero; False always drafts all.
        rejection_sample_method: "standard" is lossless (and "probabilistic" another word for it). "synthetic" is for
            benchmarks and its output means nothing: it verifies in full, and then accepts each draft at random.
        synthetic_acceptance_rate: the probability with which it accepts a draft whose ancestors it has accepted.
    """

    method: str
    num_speculative_tokens: int = 4
    model: str | None = None
    revision: str | None = None
    load_format: str | None = None
    draft_tensor_parallel_size: int = 1
    prompt_lookup_max: int = _UNSET
    prompt_lookup_min: int = _UNSET
    speculative_token_tree: str | None = None
    adaptive: bool = True
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        for name, synonyms in _SYNONYMS.items():
            self._set(name, synonyms.get(getattr(self, name), getattr(self, name)))
        if self.method not in METHODS:
            raise ValueError(f"speculative method={self.method!r}: choose one of {', '.join(METHODS)}")
        self._take_depth()
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be from 1 to {MAX_SPECULATIVE_TOKENS}"
            )
        if self.method in _NEED_MODEL and self.model is None:
            raise ValueError(f'speculative method={self.method!r} needs a model: add "model": "..."')
        if self.method not in _NEED_MODEL and self.model is not None:
            raise ValueError(f"speculative method={self.method!r} has no model: leave model={self.model!r} out")
        if self.draft_tensor_parallel_size != 1:
            raise ValueError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size}: tensor parallelism of a drafter is not "
                "supported, set it to 1"
            )
        if self.rejection_sample_method not in ("standard", "synthetic"):
            why = _NOT_OURS.get(self.rejection_sample_method, "")
            raise ValueError(
                f"rejection_sample_method={self.rejection_sample_method!r}: choose standard or synthetic"
                + (f" ({why})" if why else "")
            )
        if not 0.0 <= self.synthetic_acceptance_rate <= 1.0:
            raise ValueError(f"synthetic_acceptance_rate={self.synthetic_acceptance_rate}: must be in [0, 1]")
        self._refuse_idle()
        self._take_prompt_lookup()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_depth(self) -> None:
        """Of a tree, where its number of nodes was given; vLLM counts these."""
        if self.tree is None:
            return
        depth = max(map(len, self.tree))
        if self.num_speculative_tokens == len(self.tree):
            self._set("num_speculative_tokens", depth)
        if self.num_speculative_tokens != depth:
            raise ValueError(
                f"speculative_token_tree is {depth} deep: set num_speculative_tokens to that, not to "
                f"{self.num_speculative_tokens} (or to its number of nodes, {len(self.tree)})"
            )

    def _take_prompt_lookup(self) -> None:
        """Fills in what was not given, where need be by what was."""
        longest, shortest = (getattr(self, name) for name in _PROMPT_LOOKUP)
        if longest is None:
            longest = max(_PROMPT_LOOKUP["prompt_lookup_max"], shortest or 0)
        if shortest is None:
            shortest = _PROMPT_LOOKUP["prompt_lookup_min"]
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"prompt_lookup_min={shortest}, prompt_lookup_max={longest}: the first must be at least 1, and no more "
                "than the second"
            )
        self._set("prompt_lookup_max", longest)
        self._set("prompt_lookup_min", shortest)

    def _refuse_idle(self) -> None:
        """What was given and would have no effect."""
        idle: dict[str, tuple[Any, str]] = {}  # name -> its default, and where it would have one
        if self.model is None:
            models = f"with a model (method {', '.join(_NEED_MODEL)})"
            idle |= {"revision": (None, models), "load_format": (None, models)}
        if self.method != "ngram":
            idle |= {name: (default, "with method='ngram'") for name, default in _PROMPT_LOOKUP.items()}
        if self.rejection_sample_method != "synthetic":
            default = type(self).synthetic_acceptance_rate
            idle["synthetic_acceptance_rate"] = default, "with rejection_sample_method='synthetic'"
        for name, (default, where) in idle.items():
            if getattr(self, name) not in (None, default):
                raise ValueError(f"speculative {name}={getattr(self, name)!r} has an effect only {where}: leave it out")

    @staticmethod
    def of(
        given: SpeculativeConfig | Mapping[str, Any], drafters: Mapping[str, str] = MappingProxyType({})
    ) -> SpeculativeConfig:
        """From a dictionary, as a command line or a trace has it.

        Args:
            drafters: method -> the model that it has where none is given.

        Raises:
            ValueError: there is no such setting, one is missing, or has a wrong value.
        """
        if isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise ValueError('speculative_config: must be an object like {"method": "ngram"}')
        kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}
        known = {field.name: field for field in fields(SpeculativeConfig)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"speculative_config has no {name!r}, only {', '.join(known)}")
            kind, _, optional = str(known[name].type).partition(" | ")
            is_right = isinstance(value, kinds[kind]) and isinstance(value, bool) == (kind == "bool")  # type: ignore[arg-type]
            if not is_right and not (optional and value is None):
                raise ValueError(f"speculative_config: {name}={value!r} must be of type {kind}")
        if "method" not in given:
            raise ValueError(f"speculative_config lacks a method: choose one of {', '.join(METHODS)}")
        method = _SYNONYMS["method"].get(given["method"], given["method"])
        named = {name: value for name, value in given.items() if value is not None}
        return SpeculativeConfig(**({"model": drafters.get(method)} | named))

    @cached_property
    def tree(self) -> tuple[tuple[int, ...], ...] | None:
        """The paths of `speculative_token_tree`; None: a chain.

        Raises:
            ValueError: it is no tree, or the drafter cannot draft one.
        """
        if self.speculative_token_tree is None:
            return None
        advice = "give paths like '[(0,), (1,), (0, 0)]'"
        try:
            paths = tuple(tuple(path) for path in ast.literal_eval(self.speculative_token_tree))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            paths = ()
        if not paths or not all(path and all(type(i) is int and i >= 0 for i in path) for path in paths):
            raise ValueError(f"speculative_token_tree={self.speculative_token_tree!r} is no list of paths: {advice}")
        if len(set(paths)) < len(paths):
            raise ValueError(f"speculative_token_tree={self.speculative_token_tree!r} names a path twice: {advice}")
        for path in paths:
            for before in (path[:-1], (*path[:-1], path[-1] - 1) if path[-1] else ()):
                if before and before not in paths:
                    raise ValueError(f"speculative_token_tree has {path} without {before}, which comes before it")
        if len(paths) > MAX_NODES:
            raise ValueError(f"speculative_token_tree has {len(paths)} nodes: give at most {MAX_NODES}")
        if self.method not in ("eagle", "medusa", "draft_model"):
            raise ValueError(f"speculative method={self.method!r} drafts no trees: leave speculative_token_tree out")
        return tuple(sorted(paths, key=lambda path: (len(path), path)))

    @property
    def synthetic_rate(self) -> float | None:
        """Return how likely a draft is accepted in a benchmark; None: drafts are verified."""
        return self.synthetic_acceptance_rate if self.rejection_sample_method == "synthetic" else None

    @property
    def max_drafts(self) -> int:
        """Drafts of a request in a step, at most: those of a whole tree."""
        return self.num_speculative_tokens if self.tree is None else len(self.tree)

    @property
    def drafts_on_host(self) -> bool:
        """The drafter is Python code that reads token ids on the host."""
        return self.method == "custom"

    @property
    def reads_features(self) -> bool:
        """The drafter keeps KV made from the model's hidden states, which a prefix hit does not bring along."""
        return self.method == "eagle"
