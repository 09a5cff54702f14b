# SPDX-License-Identifier: Apache-2.0
"""Keeps TorchDynamo out of the backend.

Dynamo traces into Python process groups at a graph break and fails there.  `torch.compiler.disable` would cure that,
but it imports the compiler (seconds) and adds microseconds to every call; marking the code objects costs nothing.
"""

from __future__ import annotations

import types
from typing import Any


def _skip_code() -> Any:
    """The function that tells Dynamo to leave a code object and all it calls alone, or None where torch has none."""
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    action = getattr(eval_frame, "_FrameAction", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    setter = getattr(eval_frame, "set_code_exec_strategy", None)
    if action is not None and strategy is not None and setter is not None:
        skip = strategy(action.SKIP, action.SKIP)
        return lambda code: setter(code, skip)
    return getattr(eval_frame, "skip_code", None)


def untraced(cls: type) -> type:
    """Class decorator: marks every function defined in the class."""
    skip = _skip_code()
    for member in list(vars(cls).values()):
        if isinstance(member, property):
            functions = [f for f in (member.fget, member.fset) if f is not None]
        elif isinstance(member, (staticmethod, classmethod)):
            functions = [member.__func__]
        else:
            functions = [member]
        for function in functions:
            if isinstance(function, types.FunctionType):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                if skip is not None:
                    skip(function.__code__)
    return cls
