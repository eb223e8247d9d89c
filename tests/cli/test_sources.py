# SPDX-License-Identifier: Apache-2.0
"""Sources of a release: found by a real uv or pip on a package index of our own, read over HTTP, kept, used offline."""

from __future__ import annotations

import importlib.util
import io
import re
import secrets
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.cli import sources, wheels
from vllm_dcp_hybrid.cli.sources import SourcesUnavailable, cached_tree, fetch_tree, given_tree

WHEEL = "vllm-9.9.9-py3-none-any.whl"
MODULES = {"vllm/__init__.py": "", "vllm/sizes.py": "def resolve():\n    return 1\n", "vllm/deep/er.py": "X = 1\n"}
BINARY_SIZE = 8 << 20

HAS_PIP = wheels.has_pip_module() or shutil.which("pip") is not None
TOOLS = [
    pytest.param("uv", marks=pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")),
    pytest.param("pip", marks=pytest.mark.skipif(not HAS_PIP, reason="needs pip")),
]
needs_http = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fsspec", "aiohttp")), reason="needs fsspec[http]"
)


def make_wheel() -> bytes:
    """A wheel whose binary, in the middle, is most of it."""
    info = "vllm-9.9.9.dist-info"
    members: dict[str, Any] = {
        "vllm/__init__.py": MODULES["vllm/__init__.py"],
        "vllm/_C.abi3.so": secrets.token_bytes(BINARY_SIZE),
        **{name: text for name, text in MODULES.items() if name != "vllm/__init__.py"},
        "vllm/data.json": "{}",
        "other/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


class Index(ThreadingHTTPServer):
    """A package index with one wheel."""

    def __init__(self, *, has_ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = make_wheel()
        self.has_ranges = has_ranges
        self.num_bytes_sent = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        status, headers, body = 200, {}, b""
        if self.path == f"/{WHEEL}":
            body = self.server.wheel
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if self.server.has_ranges:
                headers["Accept-Ranges"] = "bytes"
            if self.server.has_ranges and wanted:
                start, end = int(wanted[1]), min(int(wanted[2] or len(body)) + 1, len(body))
                status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(body)}"
                body = body[start:end]
        elif self.path == "/simple/vllm/":
            headers["Content-Type"] = "text/html"
            body = f'<!DOCTYPE html><html><body><a href="/{WHEEL}">{WHEEL}</a></body></html>'.encode()
        else:
            status = 404
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.server.num_bytes_sent += len(body)
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(sources.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what uv knows about interpreters; each index has a port of its own."""
    return tmp_path_factory.mktemp("uv")


@pytest.fixture(params=[True])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, uv_cache: Path) -> Iterator[Index]:
    """The only index that uv and pip know."""
    with Index(has_ranges=request.param) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
            monkeypatch.setenv(name, server.url)
        monkeypatch.setenv("UV_CACHE_DIR", str(uv_cache))
        monkeypatch.setenv("UV_NO_CONFIG", "1")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only one that is found."""
    which = shutil.which
    monkeypatch.setattr(wheels.shutil, "which", lambda name: which(name) if name == request.param else None)
    name: str = request.param
    return name


def python_files(root: Path) -> dict[str, str]:
    return {path.relative_to(root.parent).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


@needs_http
@pytest.mark.parametrize("tool", TOOLS, indirect=True)
def test_the_python_files_of_a_release_are_fetched_and_nothing_else(index: Index, tool: str, cache: Path) -> None:
    root = fetch_tree("9.9.9")
    assert python_files(root) == MODULES
    assert [path.name for path in cache.iterdir()] == ["vllm-9.9.9"]


@needs_http
@pytest.mark.parametrize("tool", TOOLS[:1], indirect=True)
def test_of_a_large_wheel_only_the_ranges_with_python_files_are_fetched(
    index: Index, tool: str, tmp_path: Path
) -> None:
    location = wheels.wheel_location("vllm", "9.9.9")
    assert location == f"{index.url.removesuffix('/simple')}/{WHEEL}"
    index.num_bytes_sent = 0
    wheels.extract_python(location, "vllm", tmp_path)
    assert 0 < index.num_bytes_sent < BINARY_SIZE / 2


@needs_http
@pytest.mark.parametrize("tool", TOOLS[:1], indirect=True)
@pytest.mark.parametrize("index", [False], indirect=True)
def test_an_index_without_ranges_gives_the_whole_wheel(index: Index, tool: str) -> None:
    assert python_files(fetch_tree("9.9.9")) == MODULES


@needs_http
@pytest.mark.parametrize("tool", TOOLS[:1], indirect=True)
def test_what_was_fetched_once_needs_no_index(index: Index, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_tree("9.9.9") is None
    root = fetch_tree("9.9.9")
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    monkeypatch.setattr(wheels, "has_pip_module", lambda: False)
    assert fetch_tree("9.9.9") == fetch_tree("9.9.9+cpu") == cached_tree("9.9.9") == root


@pytest.mark.parametrize("tool", TOOLS, indirect=True)
def test_a_release_that_the_index_lacks_is_named(index: Index, tool: str, cache: Path) -> None:
    with pytest.raises(SourcesUnavailable, match=rf"{tool} finds no wheel of vllm==9\.9\.8 for Linux: .") as caught:
        fetch_tree("9.9.8")
    assert "\n" not in str(caught.value)
    assert not cache.exists()


def test_without_uv_and_pip_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    monkeypatch.setattr(wheels, "has_pip_module", lambda: False)
    with pytest.raises(SourcesUnavailable, match="neither uv nor pip is installed"):
        fetch_tree("9.9.9")


@pytest.mark.parametrize("content", [b"no zip file", b""])
def test_a_wheel_that_is_none_leaves_nothing_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    wheel = tmp_path / WHEEL
    wheel.write_bytes(content)
    monkeypatch.setattr(sources, "wheel_location", lambda *args: wheel.as_uri())
    with pytest.raises(SourcesUnavailable, match="cannot be read"):
        fetch_tree("9.9.9")
    assert list(cache.iterdir()) == []


def test_a_wheel_of_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    monkeypatch.setattr(sources, "wheel_location", lambda *args: wheel.as_uri())
    with pytest.raises(SourcesUnavailable, match="holds no Python files of vllm"):
        fetch_tree("9.9.9")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(sources, "wheel_location", lambda *args: "file:///nowhere.whl")
    with pytest.raises(SourcesUnavailable, match="cannot be written"):
        fetch_tree("9.9.9")


@pytest.mark.parametrize("inside", [True, False])
def test_a_tree_at_hand_is_the_package_or_holds_it(tmp_path: Path, inside: bool) -> None:
    root = tmp_path / "checkout" / "vllm"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "_version.py").write_text("__version__ = version = '9.9.9+cpu'\n")
    assert given_tree(root if inside else root.parent) == (root, "9.9.9+cpu")
    assert given_tree(root, "9.9.8") == (root, "9.9.8")


def test_a_tree_at_hand_that_is_none_or_of_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourcesUnavailable, match="nor does it hold one"):
        given_tree(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    with pytest.raises(SourcesUnavailable, match="name it with --release"):
        given_tree(tmp_path)
