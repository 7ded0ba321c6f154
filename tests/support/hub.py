"""A stand-in for the hub's HTTP API on this machine: one repository, and faults on request."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "1234567890" * 4


class Hub(ThreadingHTTPServer):
    """Serves a folder as `repository` at the branches `main` and `fp16`."""

    daemon_threads = True

    def __init__(self, folder: Path, repository: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.repository = folder, repository
        self.gated = False
        self.cut: str | None = None  # a file whose transfers end in the middle …
        self.cuts = 0  # … as often as this
        self.requests: list[tuple[str, str, str]] = []  # method, path, range

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(folder: Path, repository: str) -> Iterator[Hub]:
    """The server, while the block runs."""
    hub = Hub(folder, repository)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if not path.startswith((api, files)):
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        names = sorted(
            str(file.relative_to(hub.folder)) for file in hub.folder.rglob("*") if file.is_file()
        )
        if path.startswith(api):
            revision = path.removeprefix(api).rpartition("/")[2] or "main"
            if revision not in ("main", "fp16", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if "/tree/" in path:
                return self._json([self._entry(name) for name in names])
            siblings = [{"rfilename": name} for name in names]
            return self._json({"id": hub.repository, "sha": COMMIT, "siblings": siblings})
        name = path.removeprefix(files).partition("/")[2]
        if name not in names:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(name, body)

    def _entry(self, name: str) -> dict[str, Any]:
        data = (self.server.folder / name).read_bytes()
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def _file(self, name: str, body: bool) -> None:
        data = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        start = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        if body and self.server.cut == name and self.server.cuts > 0:
            self.server.cuts -= 1
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(b"" if start else data[: len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if body and start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[int(start) :], headers)
        else:
            self._send(200, data if body else b"", headers, length=len(data))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
