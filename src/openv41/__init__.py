"""openv41: an open implementation of DeepSeek-V4.1-Flash.

    import openv41
    assistant = openv41.load("DeepSeek-V4.1-Flash")
    print(assistant.generate("def fibonacci(n):", max_new_tokens=64).text)

The names below are the public ones. Each is imported when it is first asked for, so that `import openv41` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from openv41._version import __version__

if TYPE_CHECKING:
    from openv41 import errors
    from openv41.api import Assistant, load
    from openv41.config import Config, SpecialIds
    from openv41.errors import (
        CacheError,
        CacheFull,
        CheckpointError,
        ConfigError,
        InputError,
        OpenV41Error,
        OpsError,
    )
    from openv41.model.attention import Attention
    from openv41.model.transformer import Transformer
    from openv41.ops import choose
    from openv41.plan import plan_layers
    from openv41.state import Cache, Step
    from openv41.texts import Completion, Piece, Prompt, Score

__all__ = [
    "Assistant",
    "Attention",
    "Cache",
    "CacheError",
    "CacheFull",
    "CheckpointError",
    "Completion",
    "Config",
    "ConfigError",
    "InputError",
    "OpenV41Error",
    "OpsError",
    "Piece",
    "Prompt",
    "Score",
    "SpecialIds",
    "Step",
    "Transformer",
    "__version__",
    "choose",
    "errors",
    "load",
    "plan_layers",
]

_ERRORS = ("CacheError", "CacheFull", "CheckpointError", "ConfigError", "InputError", "OpenV41Error", "OpsError")
_HOMES = {
    "Assistant": "api",
    "Attention": "model.attention",
    "Cache": "state",
    "Completion": "texts",
    "Config": "config",
    "Piece": "texts",
    "Prompt": "texts",
    "Score": "texts",
    "SpecialIds": "config",
    "Step": "state",
    "Transformer": "model.transformer",
    "choose": "ops",
    "load": "api",
    "plan_layers": "plan",
    **dict.fromkeys(_ERRORS, "errors"),
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("openv41.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'openv41' has no attribute {name!r}")
    value = getattr(import_module(f"openv41.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
