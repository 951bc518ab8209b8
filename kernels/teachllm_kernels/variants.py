"""Collect what Triton has to compile for the launches of a dry run, and compile it for any GPU, or without one.

Triton compiles a kernel when it is launched, once for each combination of its arguments' types, their alignment, the
values of its constants and the options of the launch: a variant. None of this needs values of tensors. So a dry run on
meta tensors meets the variants that the same steps on a GPU would, and compiling these beforehand leaves results where
a launch looks for them: in Triton's cache on disk.

    launch     (function, arguments)                what a dry run reports
    variant    (function, signature, constants, …)  how Triton's own binder sees these arguments
    compiled   files in Triton's cache              found by the hash of all that, the source and the version

Source: `triton.runtime.jit.JITFunction.run`, whose steps between a launch and its compilation are done here without a
device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any, NamedTuple

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from teachllm_kernels._triton import triton
from teachllm_kernels.gpu_type import GPUType

__all__ = ["KernelVariant", "KernelVariants", "compiled", "compiler_version", "key_of", "target_of"]


class KernelVariant(NamedTuple):
    """Describe a kernel as it is compiled for some launches.

    Attributes:
        function: the Triton or Gluon function.
        signature: the type of each parameter.
        constants: the values of parameters that are compiled in.
        attributes: what else is known of parameters: multiples of 16.
        options: of the launch: warps, stages, ...
    """

    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any

    @property
    def name(self) -> str:
        """Return the function's name."""
        name: str = self.function.__name__
        return name

    @property
    def source(self) -> Any:
        """Return what Triton compiles."""
        kind = GluonASTSource if self.function.is_gluon() else ASTSource
        return kind(self.function, self.signature, self.constants, self.attributes)


def target_of(gpu: GPUType) -> GPUTarget:
    """Return Triton's name of a type of GPU."""
    if gpu.is_amd:
        return GPUTarget("hip", gpu.target, 64)
    return GPUTarget("cuda", int(gpu.target.removeprefix("sm_")), 32)


def key_of(variant: KernelVariant, target: GPUTarget) -> str:
    """Return the key by which Triton's cache has a variant, as `triton.compile` computes it."""
    source, backend = variant.source, make_backend(target)
    options = backend.parse_options(variant.options.__dict__ | source.parse_options())
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def compiler_version(gpu: GPUType) -> str:
    """Return what else decides what is compiled: the assembler's version, and variables that the compiler reads."""
    return f"{make_backend(target_of(gpu)).hash()} {sorted(get_cache_invalidating_env_vars().items())}"


class KernelVariants:
    """Collect the variants of a dry run's launches: `dry_run(gpu, variants.add)`.

    Attributes:
        by_key: each variant once, by what tells it from others, in the order in which launches met them.
    """

    def __init__(self, gpu: GPUType) -> None:
        self.by_key: dict[Hashable, KernelVariant] = {}
        self._backend = make_backend(target_of(gpu))
        self._binders: dict[Any, tuple[Any, dict[Any, Any]]] = {}

    def add(self, function: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        """Note a launch, as the `on_launch` of a dry run."""
        options["debug"] = options.get("debug", function.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        if function not in self._binders:
            binder = create_function_from_signature(function.signature, function.params, self._backend)
            self._binders[function] = binder, {}
        binder, keys = self._binders[function]
        bound, specialization, options = binder(*args, **options)
        key = function, compute_cache_key(keys, specialization, options)
        if key not in self.by_key:
            parsed, signature, constants, attributes = function._pack_args(
                self._backend, options, bound, specialization, options
            )
            self.by_key[key] = KernelVariant(function, signature, constants, attributes, parsed)


def compiled(variant: KernelVariant, target: GPUTarget) -> Any:
    """Compile a variant, unless Triton's cache has it, and return it as Triton does.

    Raises:
        Exception: whatever the compiler raises.
    """
    return triton.compile(variant.source, target=target, options=variant.options.__dict__)
