# SPDX-License-Identifier: Apache-2.0
"""The generated bindings, the loader and the errors; no ranks."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpubridge import _abi, _native, errors

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATOR = ROOT / "tools" / "gen_ctypes.py"
ABI_FILE = ROOT / "python" / "gpubridge" / "_abi.py"


def test_bindings_are_what_the_header_says(tmp_path: Path) -> None:
    fresh = tmp_path / "_abi.py"
    subprocess.run([sys.executable, str(GENERATOR), "-o", str(fresh)], check=True)
    assert fresh.read_text() == ABI_FILE.read_text(), "run tools/gen_ctypes.py"


def test_generator_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    header = tmp_path / "x.h"
    header.write_text("union u { int a; };\n")
    done = subprocess.run(
        [sys.executable, str(GENERATOR), str(header), "-o", str(tmp_path / "y.py")], capture_output=True
    )
    assert done.returncode == 1 and b"union u" in done.stderr
    assert not (tmp_path / "y.py").exists()


def test_struct_sizes_match_the_compiler(tmp_path: Path) -> None:
    """ctypes and the C compiler lay the structs out alike."""
    names = {"gpubridge_op": _abi.Op, "gpubridge_context_config": _abi.ContextConfig}
    names |= {"gpubridge_comm_config": _abi.CommConfig, "gpubridge_comm_stats": _abi.CommStats}
    lines = [f'printf("%zu\\n", sizeof(struct {name}));' for name in names]
    source = tmp_path / "size.c"
    source.write_text("#include <gpubridge/gpubridge.h>\n#include <stdio.h>\nint main(void){" + "".join(lines) + "}")
    subprocess.run(["cc", "-I", str(ROOT / "include"), str(source), "-o", str(tmp_path / "size")], check=True)
    found = subprocess.run([str(tmp_path / "size")], capture_output=True, check=True, text=True).stdout.split()
    assert [int(size) for size in found] == [ctypes.sizeof(cls) for cls in names.values()]


def test_library_has_our_abi_and_every_function() -> None:
    lib = _native.lib()
    assert lib.abi() == _abi.ABI
    assert _native.version().count(".") == 2
    assert all(hasattr(lib, name) for name, _, _ in _abi.FUNCTIONS)


def test_wrong_library_is_named(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int gpubridge_abi(void) { return 999; }")
    other = tmp_path / "libother.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    with pytest.raises(errors.GpuBridgeLibraryError, match="ABI 999"):
        _native.Library(str(other))
    with pytest.raises(errors.GpuBridgeLibraryError, match="not libgpubridge"):
        _native.Library(ctypes.util.find_library("m") or "libm.so.6")


def test_missing_library_says_what_to_do(tmp_path: Path) -> None:
    env = dict(os.environ, GPUBRIDGE_LIBRARY=str(tmp_path / "nowhere.so"))
    done = subprocess.run(
        [sys.executable, "-c", "import gpubridge._native as n; n.lib()"], env=env, capture_output=True, text=True
    )
    assert done.returncode != 0 and "nowhere.so: no such file" in done.stderr


def test_every_status_has_a_name_words_and_a_class() -> None:
    statuses = {name: value for name, value in vars(_abi).items() if name.startswith("ERR_")}
    for name, value in statuses.items():
        assert errors.status_name(value) == f"GPUBRIDGE_{name}"
        assert _native.lib().strerror(value)
        error = errors.CLASS_OF.get(value, errors.GpuBridgeError)("text", value)
        assert error.status == value and str(error) == "text" and isinstance(error, RuntimeError)
        again: Any = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and again.status == value and str(again) == "text"


def test_errors_are_the_builtins_users_expect() -> None:
    import torch.distributed as dist
    from gpubridge.torch import errors as torch_errors

    for status, builtin in (
        (_abi.ERR_TIMEOUT, TimeoutError),
        (_abi.ERR_PEER_LOST, ConnectionError),
        (_abi.ERR_INVALID, ValueError),
        (_abi.ERR_UNSUPPORTED, TypeError),
    ):
        assert issubclass(errors.CLASS_OF[status], builtin)
        assert issubclass(torch_errors.CLASS_OF[status], builtin)
        assert issubclass(torch_errors.CLASS_OF[status], dist.DistBackendError)
        again: Any = pickle.loads(pickle.dumps(torch_errors.CLASS_OF[status]("x", status)))
        assert again.status == status and isinstance(again, builtin)


def test_settings_of_groups_are_those_of_the_table() -> None:
    """The torch layer knows which settings may differ between groups; the library's table is the truth."""
    from gpubridge.torch.options import GROUP_SETTINGS

    lib = _native.lib()
    secret = b"0123456789abcdef"
    config = _abi.ContextConfig(struct_size=ctypes.sizeof(_abi.ContextConfig))
    config.secret = ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p)
    config.secret_bytes = len(secret)
    context = ctypes.c_void_p()
    _native.check(lib.context_create(ctypes.byref(config), ctypes.byref(context)))
    try:
        for name, _, value, _ in _native.settings():
            comm = _abi.CommConfig(struct_size=ctypes.sizeof(_abi.CommConfig), name=b"x", rank=0, size=1)
            comm.settings = f"{name}={value}".encode()
            hello, length = ctypes.create_string_buffer(_abi.HELLO_BYTES), ctypes.c_size_t(_abi.HELLO_BYTES)
            status = lib.comm_hello(context, ctypes.byref(comm), hello, ctypes.byref(length))
            assert (status == _abi.OK) == (name in GROUP_SETTINGS), (name, _native.last_error(status))
    finally:
        lib.context_destroy(context)


def test_autoload_registers_without_loading_us() -> None:
    """The entry point at the end of `import torch` must be cheap, and silent whatever goes wrong."""
    code = (
        "import sys, torch, gpubridge._torch_ep as ep; ep.autoload(); ep.autoload();"
        "import torch.distributed as d; assert 'GPUBRIDGE' in d.Backend._plugins;"
        "assert 'gpubridge.torch' not in sys.modules;"
        "d.is_available = None; ep.autoload()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options() -> None:
    from datetime import timedelta

    from gpubridge.torch.options import Options, nanoseconds

    options = Options.of({"lanes": 3, "GPUBRIDGE_CHUNK_BYTES": "1M", "device": 2})
    assert options.device == 2
    assert options.lines(of_group=True) == b"GPUBRIDGE_CHUNK_BYTES=1M"
    assert options.lines(of_group=False) == b"GPUBRIDGE_LANES=3"
    assert Options.of(None).lines(True) is None
    assert nanoseconds(timedelta(milliseconds=-1), 7) == nanoseconds(None, 7) == nanoseconds(timedelta(0), 7) == 7
    assert nanoseconds(timedelta(seconds=2), 7) == 2_000_000_000
