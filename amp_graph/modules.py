"""Questions about a user's module, apart from its graphs: its plain call, its code, its devices.

Private names of PyTorch used here:

    torch._dynamo.eval_frame.OptimizedModule    what `torch.compile(model)` is
    Module._compiled_call_impl                  what `model.compile()` sets
    get_compiler_config                         of functions that it returned (works on 2.13, there
                                                in 2.15, which calls it public)
    torch.nn.modules.module._global_backward_hooks, _global_backward_pre_hooks
                                                those for all modules
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules import module as of_all
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amp_graph.weak_references import alive

Run = Callable[..., Any]
CALL = "_call_impl"  # the method of nn.Module that runs a call of it


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside PyTorch's data-parallel wrappers."""
    inner: Any = model  # whose class is asked in C: `isinstance` would ask the latter's in Python
    while DataParallel in (kinds := type(inner).__mro__) or DistributedDataParallel in kinds:
        inner = inner.module
    return inner  # type: ignore[no-any-return]


def below_compile(module: nn.Module) -> nn.Module:
    """Return the module inside of what `torch.compile` returned; any other module as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled by `torch.compile` or its `compile()`, or its own `forward`
    was."""
    return is_compiled_around(module) or _is_compiled(module.__dict__.get("forward"))


def is_compiled_around(module: nn.Module) -> bool:
    """Whether a module was compiled as a whole, by `torch.compile` or its `compile()`."""
    is_around = isinstance(module, OptimizedModule)
    return is_around or module.__dict__.get("_compiled_call_impl") is not None


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether the `forward` of a module, or of its class, was compiled by itself. A norm or a
    rotary embedding of a library may be, without the user's knowledge."""
    return any(map(_is_compiled, (getattr(module, "forward", None), getattr(type(module), CALL))))


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "get_compiler_config")


class Entry:
    """An entry point of a model: its call, or another of its methods. Does not keep the model
    alive."""

    def __init__(self, module: nn.Module, method: str = CALL):
        self._module = weakref.ref(module)
        self.method = method

    @property
    def module(self) -> nn.Module:
        return alive(self._module)

    @property
    def is_call(self) -> bool:
        return self.method == CALL

    @property
    def name(self) -> str:
        kind = type(self.module).__name__
        return kind if self.is_call else f"{kind}.{self.method}"

    @property
    def entered(self) -> Run:
        """The method whose arguments are those of the call."""
        return getattr(self.module, "forward" if self.is_call else self.method)  # type: ignore[no-any-return]

    @property
    def function(self) -> Run:
        """The function that runs, which takes the module and the arguments."""
        return getattr(type(self.module), self.method)  # type: ignore[no-any-return]


def _method_of(module: nn.Module, name: str) -> tuple[Any, Any]:
    """Return a module's class and its method of this name as it stands in the class. (An access
    through the class makes another object each time for a `functools.partialmethod`.)"""
    kind = type(module)
    for base in kind.__mro__:
        if name in base.__dict__:
            return kind, base.__dict__[name]
    return kind, None


def _may_change(place: str) -> bool:
    """Whether classes of this Python module may get another `forward`. A GraphModule, which has a
    class of its own, gets one when its graph is edited."""
    return place == fx.graph_module.__name__ or not place.startswith("torch.")


class Forwards:
    """The code by which a model and its parts are called, as it is now. Parts of PyTorch's are left
    out.

    A notebook that reloads modules puts other code into a function, a patch another function into a
    class. Dynamo guards neither.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry, self._entered = entry, "forward" if entry.is_call else entry.method
        model = entry.module
        self._models = _method_of(model, self._entered)
        kinds = dict.fromkeys(type(m) for m in model.modules())
        own = (k for kind in kinds for k in kind.__mro__ if "forward" in k.__dict__)
        found = {k: k.__dict__["forward"] for k in own if _may_change(k.__module__)}
        self._found = [(k.__dict__, f, getattr(f, "__code__", None)) for k, f in found.items()]

    @property
    def all(self) -> tuple[Any, ...]:
        """A key that is equal for two models called by the same code."""
        return *self._models, *((forward, code) for _, forward, code in self._found)

    def have_changed(self) -> bool:
        """Whether a call of the model runs other code now."""
        for names, forward, code in self._found:
            found = names.get("forward")
            if found is not forward or getattr(found, "__code__", None) is not code:
                return True
        return _method_of(self._entry.module, self._entered) != self._models


def is_rerouted(module: nn.Module) -> bool:
    """Whether the next call of a model, or of PyTorch's wrapper around it, runs something else: a
    function that stands in for `forward` for one call, and sets another `forward` as it begins.
    Lightning runs `training_step`, which calls the model, inside of a wrapper that way."""
    forward = unwrapped(module).__dict__.get("forward")
    return isinstance(forward, FunctionType) and _sets_forward(forward.__code__)


@lru_cache
def _sets_forward(code: CodeType) -> bool:
    instructions = dis.get_instructions(code)
    return any(i.opname == "STORE_ATTR" and i.argval == "forward" for i in instructions)


def devices_of(module: nn.Module) -> frozenset[str]:
    """Return the types of the devices that a model's parameters are on."""
    return frozenset(p.device.type for p in module.parameters())


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the user's code gets gradients of values that a module, or one in it, computes."""
    for_all = of_all._global_backward_hooks or of_all._global_backward_pre_hooks
    return bool(for_all) or any(
        m._backward_hooks or m._backward_pre_hooks for m in module.modules()
    )


def plain_code(module: nn.Module, method: str = CALL) -> Run:
    """Return a function that runs a method of a module, its call by default, as before conversion.
    It does not keep the module alive."""
    function: Run = getattr(type(module), method)
    reference = weakref.ref(module)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    return plain
