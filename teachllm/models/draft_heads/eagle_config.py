"""Read an EAGLE head's config.json and the names of its tensors: four ways to write the same few facts.

    authors, SGLang   keys of a Llama layer; EAGLE-3's is `midlayer`, its layers `eagle_config`'s
    vLLM              the same, and the layers beside the other keys; or a Llama layer's keys in `model`
    speculators       the layer's keys in `transformer_layer_config`, its tensors `layers.0`

Which of the model's layers are fused is numbered in two ways. Within `eagle_config` an id means the output of a layer:
SpecForge, which writes it, trains on `hidden_states[id + 1]`, and SGLang adds the 1. Beside the other keys, where vLLM
and speculators have them, an id means a layer's input. So does the default, 2, the middle and the last but two, which
all have from the authors. Here they are inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from teachllm.checkpoint.json_values import JsonObject
from teachllm.errors import ModelError
from teachllm.models.families.llama_config import DENSE, LlamaConfig, parse
from teachllm.models.shape import Shape
from teachllm.models.spec import PagedSpec

# Tensors of which the others, or the model's own, say the same.
_NOT_READ = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight)$")
_NESTED = ("model", "transformer_layer_config")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleConfig:
    """Describe what a config.json of an EAGLE head says, and what its tensors do.

    Attributes:
        llama: of its layer.
        is_third: EAGLE-3.
        layer_name: what the checkpoint calls its layer.
        feature_layers: whose inputs' residual streams are fused; none: the model's last hidden state.
        draft_vocab_size: of its own output head, or the model's vocabulary.
        norm_before_residual: the residual stream of EAGLE-3's layer starts normalised.
        norm_before_fc, fc_norm: what is fused is normalised before, as one vector, or each layer's by itself.
        norm_output: the layer goes on from its normalised output.
        has_own_ids: `d2t` says which id of the model each of its output head's stands for.
        has_embedding, has_head, has_fc_bias: which tensors the checkpoint has; what it lacks is the model's.
    """

    llama: LlamaConfig
    is_third: bool
    layer_name: str
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has_own_ids: bool
    has_embedding: bool
    has_head: bool
    has_fc_bias: bool

    @property
    def num_ids(self) -> int:
        """Return the number of ids that it can guess among."""
        return self.draft_vocab_size if self.has_head else self.llama.vocab_size

    @property
    def num_heads(self) -> int:
        """Return the number of query heads of its layer."""
        return self.llama.num_heads

    @property
    def kept(self) -> PagedSpec:
        """Return what its layer keeps per token."""
        return PagedSpec(self.llama.num_kv_heads, self.llama.head_size, self.llama.windows[0])

    def tensor_name(self, name: str) -> str | None:
        """Return `tensor_name` of a stored tensor."""
        return tensor_name(name)

    @staticmethod
    def parse(settings: JsonObject, stored: Collection[str], model: Shape) -> EagleConfig:
        """Read a head's settings.

        Args:
            settings: config.json.
            stored: the checkpoint's tensors, by the names of `tensor_name`.
            model: the model that the head was made for.

        Raises:
            ModelError: the head is for another model, or of a form that is not known, or a value has a wrong type.
        """
        _check_form(settings)
        for key in _NESTED:
            settings = JsonObject(settings.as_dict() | settings.object(key).as_dict(), settings.where)
        llama = _layer_config(settings, stored)
        is_third = any(re.search(r"(^|\.)(midlayer|hidden_norm|d2t)(\.|$)", name) for name in stored)
        if not is_third and "layers.0.input_layernorm.weight" in stored:
            raise ModelError(
                "an EAGLE head whose layer has an input_layernorm is not supported: the authors' layer has none, and "
                "its config.json does not say whether it is to be applied"
            )
        for name, theirs, ours in (
            ("vocab_size", llama.vocab_size, model.vocab_size),
            ("hidden_size", settings.integer("target_hidden_size", llama.hidden_size), model.hidden_size),
        ):
            if theirs != ours:
                raise ModelError(f"the EAGLE head has {name}={theirs} and the model has {ours}: take its own head")
        if llama.hidden_size != model.hidden_size:
            raise ModelError(
                f"an EAGLE head of hidden_size={llama.hidden_size} beside {model.hidden_size} is not supported"
            )
        if settings.integer("truncated_vocab_size", model.vocab_size) != model.vocab_size:
            raise ModelError("an EAGLE head with a truncated vocabulary is not supported: take one with a whole one")
        if llama.num_layers != 1:
            raise ModelError(f"an EAGLE head of {llama.num_layers} layers is not supported, only of one")
        draft_vocab_size = settings.integer("draft_vocab_size", model.vocab_size) if is_third else model.vocab_size
        if draft_vocab_size > model.vocab_size:
            raise ModelError(f"the EAGLE head has draft_vocab_size={draft_vocab_size} and the model {model.vocab_size}")
        return EagleConfig(
            llama=llama,
            is_third=is_third,
            layer_name="midlayer" if any("midlayer." in name for name in stored) else "layers.0",
            feature_layers=_feature_layers(settings, model.num_layers) if is_third else (),
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=is_third and settings.flag("norm_before_residual", False),
            norm_before_fc=is_third and settings.flag("norm_before_fc", False),
            fc_norm=is_third and settings.flag("fc_norm", False),
            norm_output=is_third and settings.flag("norm_output", False),
            has_own_ids=draft_vocab_size != model.vocab_size or "d2t" in stored,
            has_embedding="embed_tokens.weight" in stored,
            has_head="lm_head.weight" in stored,
            has_fc_bias="fc.bias" in stored,
        )


def tensor_name(name: str) -> str | None:
    """Return a tensor's name without what some put around it; None: it is not read."""
    if _NOT_READ.search(name):
        return None
    return name.removeprefix("model.").replace("layers.0.midlayer.", "midlayer.")


def _check_form(settings: JsonObject) -> None:
    """Refuse by name a head that looks like a known one and computes something else."""
    form = settings.text("speculators_model_type", "eagle3")
    if form != "eagle3":
        raise ModelError(f"a speculator of speculators_model_type={form!r} is not supported, only of 'eagle3'")
    if not settings.object("eagle_config").flag("use_aux_hidden_state", True):
        raise ModelError("an EAGLE head with eagle_config.use_aux_hidden_state=False is not supported")
    for name in ("parallel_drafting", "add_para_norm"):
        if settings.flag(name, False):
            raise ModelError(f"an EAGLE head with {name}=True is not supported")
    if settings.flag("norm_before_fc", False) and settings.flag("fc_norm", False):
        raise ModelError("an EAGLE head has norm_before_fc or fc_norm, not both")


def _layer_config(settings: JsonObject, stored: Collection[str]) -> LlamaConfig:
    """Return the layer's configuration; biases and norms of Q and K are the stored ones, whatever the architecture."""
    names = [*settings.entries("architectures"), f"{settings.text('model_type', '').capitalize()}ForCausalLM"]
    architecture = next((name for name in names if name in DENSE), "LlamaForCausalLM")
    raw = {key: value for key, value in settings.as_dict().items() if key != "model_type"}  # of the head, maybe
    llama = parse({"num_hidden_layers": 1, **raw, "architectures": [architecture]}, settings.where)

    def has(tensor: str) -> bool:
        return any(name.endswith(tensor) for name in stored)

    return replace(
        llama,
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.up_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )


def _feature_layers(settings: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs are the features."""
    inputs, outputs = settings.integers(_LAYER_IDS), settings.object("eagle_config").integers(_LAYER_IDS)
    layers = inputs or tuple(index + 1 for index in outputs) or (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= index < num_layers for index in layers):
        what = f"inputs of layers {layers}" if inputs or not outputs else f"outputs of layers {outputs}"
        raise ModelError(
            f"the EAGLE head reads the {what}, and of the model's {num_layers} layers it can read the inputs of "
            f"0 to {num_layers - 1}: take its own head"
        )
    return layers
