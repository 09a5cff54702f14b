# SPDX-License-Identifier: Apache-2.0
"""Entry points that torch calls; imports nothing heavy and never raises while torch itself is being imported.

`register` serves the group "torch.distributed.backends" (torch >= 2.14: called when the user first names the backend).
`autoload` serves "torch.backends" (torch 2.5 to 2.13: called at the end of `import torch`); an exception there would
break `import torch`, so it only leaves a creator behind that imports the package when a group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend now; errors reach the user, who asked for it by name."""
    import gpubridge.torch  # noqa: F401


def _create(options: Any, pg_options: Any) -> Any:
    from gpubridge.torch import create

    return create(options, pg_options)


def autoload() -> None:
    """Makes "gpubridge" known to torch.distributed without importing this package's torch layer."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "_ensure_backend_registered"):
            return
        if "GPUBRIDGE" not in dist.Backend._plugins:
            dist.Backend.register_backend("gpubridge", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # whatever it is, it must not break `import torch`; `import gpubridge.torch` will show it
        pass
