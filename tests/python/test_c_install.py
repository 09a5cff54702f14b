# SPDX-License-Identifier: Apache-2.0
"""What a C user gets: headers, both libraries, pkg-config and the manual page, from an install into a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [str(ROOT / "examples" / "c" / name) for name in ("all_reduce.c", "exchange_file.c")]


def run(*command: str, **env: str) -> str:
    done = subprocess.run(
        command, env=dict(os.environ, **env), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which build/ was installed (what a package would hold)."""
    build = ROOT / "build"
    if not (build / "build.ninja").exists():
        pytest.skip("build/ is not there: the library is tested from an installed wheel")
    meson = shutil.which("meson") or str(Path(sys.executable).parent / "meson")
    folder = tmp_path_factory.mktemp("root")
    run(meson, "install", "-C", str(build), "--no-rebuild", "--quiet", "--destdir", str(folder))
    return folder


def pkg_config(installed: Path, *arguments: str) -> list[str]:
    [folder] = [str(path.parent) for path in installed.rglob("gpubridge.pc")]
    # The sysroot goes before every path of the .pc file: the package is not where it will be.
    env = {"PKG_CONFIG_PATH": folder, "PKG_CONFIG_SYSROOT_DIR": str(installed)}
    return run("pkg-config", *arguments, "gpubridge", **env).split()


def all_ranks_agree(program: Path, **env: str) -> None:
    text = run("sh", str(ROOT / "examples" / "c" / "run.sh"), "file", str(program), "100003", **env)
    for rank in range(4):
        assert f"rank {rank} of 4: 100003 sums, 0 wrong" in text, text
    assert "2 islands" in text, text


def test_example_against_the_shared_library(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "all_reduce"
    flags = pkg_config(installed, "--cflags", "--libs")
    assert not any(word in " ".join(flags) for word in ("crypto", "xxhash")), flags
    run("cc", "-std=c17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", *SOURCES, *flags, "-o", str(program))
    [library] = [path for path in installed.rglob("libgpubridge.so.0") if path.is_symlink()]
    all_ranks_agree(program, LD_LIBRARY_PATH=str(library.parent))


def test_example_against_the_static_library(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "all_reduce"
    flags = pkg_config(installed, "--static", "--cflags", "--libs")
    flags = ["-l:libgpubridge.a" if flag == "-lgpubridge" else flag for flag in flags]
    run("cc", "-std=c17", "-D_GNU_SOURCE", *SOURCES, *flags, "-o", str(program))
    assert "libgpubridge" not in run("ldd", str(program))
    all_ranks_agree(program)


def test_what_is_installed(installed: Path) -> None:
    names = {path.name for path in installed.rglob("*") if path.is_file() or path.is_symlink()}
    wanted = {"gpubridge.h", "straggler.h", "libgpubridge.so", "libgpubridge.so.0", "libgpubridge.a", "gpubridge.pc"}
    assert wanted <= names, names
    assert any(name.startswith("gpubridge.3") for name in names), names
    strange = {path.name for path in installed.rglob("*.so*")} - {"libgpubridge.so", "libgpubridge.so.0"}
    assert all(name.startswith("libgpubridge.so.0.") for name in strange), strange
    assert pkg_config(installed, "--modversion") == ["0.1.0"]


def test_manual_page_shows_every_function(installed: Path) -> None:
    """As a reader sees it, without a warning of the formatter; lint keeps it equal to the header."""
    if not shutil.which("man"):
        pytest.skip("needs the program man")
    [page] = installed.rglob("gpubridge.3*")
    done = subprocess.run(
        ["man", "--warnings", "-l", str(page)],
        env=dict(os.environ, MANWIDTH="200", LC_ALL="C.UTF-8"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    symbols = run("nm", "-D", "--defined-only", str(next(iter(installed.rglob("libgpubridge.so.0")))))
    functions = {line.split()[2].split("@")[0] for line in symbols.splitlines() if " T gpubridge_" in line}
    header = (ROOT / "include" / "gpubridge" / "gpubridge.h").read_text()
    ours = sorted(name for name in functions if f"{name}(" in header)
    assert len(ours) > 30, ours
    for name in ours:
        assert f"{name}(" in done.stdout, f"{name} is not in the manual page"
