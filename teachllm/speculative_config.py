"""How to speculate: who drafts, and how many tokens. The words are vLLM's `--speculative-config`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("ngram", "draft_model", "eagle", "medusa", "custom")
_SYNONYMS = {"eagle3": "eagle"}
_NEED_MODEL = ("draft_model", "eagle", "medusa")
MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    Attributes:
        method: "ngram" looks up where the last tokens stood before; "draft_model" asks a smaller model; "eagle" and
            "medusa" are heads on the model itself; "custom" is a drafter that was passed to the engine.
        num_speculative_tokens: tokens to draft, at most.
        model: folder or hub id of the draft model, or of the heads; "teachlm-draft", "teachlm-eagle" and
            "teachlm-medusa" come with the package.
        revision: branch, tag or commit of it on the hub.
        load_format: as the engine's, which it is if None.
        prompt_lookup_max, prompt_lookup_min: "ngram" looks for as many of the last tokens, at most and at least.
        speculative_token_tree: paths of a tree of drafts as a list in a string, "[(0,), (1,), (0, 0)]": the best and
            the second-best next token, and what follows the best. None is a chain.
        adaptive: the length follows load and measured acceptance, down to zero; False always drafts all.
        rejection_sample_method: "standard" is lossless. "synthetic" is for benchmarks and its output means nothing: it
            verifies in full, and then accepts each draft at random.
        synthetic_acceptance_rate: how many of them, in the mean.
    """

    method: str
    num_speculative_tokens: int = 4
    model: str | None = None
    revision: str | None = None
    load_format: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    speculative_token_tree: str | None = None
    adaptive: bool = True
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _SYNONYMS.get(self.method, self.method))
        if self.method not in METHODS:
            raise ValueError(f"speculative method={self.method!r}: choose one of {', '.join(METHODS)}")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}: must be from 1 to {MAX_SPECULATIVE_TOKENS}"
            )
        if self.method in _NEED_MODEL and self.model is None:
            raise ValueError(f'speculative method={self.method!r} needs a model: add "model": "..."')
        if self.method not in _NEED_MODEL and self.model is not None:
            raise ValueError(f"speculative method={self.method!r} has no model: leave model={self.model!r} out")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}: "
                "the first must be at least 1, and no more than the second"
            )
        if self.rejection_sample_method not in ("standard", "synthetic"):
            raise ValueError(f"rejection_sample_method={self.rejection_sample_method!r}: choose standard or synthetic")
        if not 0.0 <= self.synthetic_acceptance_rate <= 1.0:
            raise ValueError(f"synthetic_acceptance_rate={self.synthetic_acceptance_rate}: must be in [0, 1]")
        self.tree  # noqa: B018 - or it is refused

    @staticmethod
    def of(given: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """From a dictionary, as a command line or a trace has it.

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
        return SpeculativeConfig(**given)

    @property
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
        if self.method not in ("eagle", "medusa", "draft_model"):
            raise ValueError(f"speculative method={self.method!r} drafts no trees: leave speculative_token_tree out")
        if max(map(len, paths)) != self.num_speculative_tokens:
            raise ValueError(
                f"speculative_token_tree is {max(map(len, paths))} deep: set num_speculative_tokens to that, "
                f"not to {self.num_speculative_tokens}"
            )
        return tuple(sorted(paths, key=lambda path: (len(path), path)))

    @property
    def synthetic_rate(self) -> float | None:
        """Share of the drafts that hold in a benchmark; None: drafts are verified."""
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
