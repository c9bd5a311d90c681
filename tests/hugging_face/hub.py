"""A hub on this machine: as much of the hub's API as pushing to it needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
USER = "me"


class Hub:
    """Keeps repositories as their files by name, and their commits.

    Attributes:
        url: the endpoint.
        repositories: files by name, by the name of the repository.
        private: names of the private ones.
        commits: names that each commit has added and removed.
        refuses: a status with which commits are refused; 0: none is.
        requests: lines of all requests.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[tuple[list[str], list[str]]] = []
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.refuses = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Take the lines of a commit."""
        files, added, removed = self.repositories[name], [], []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                added.append(value["path"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
                added.append(value["path"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                removed.append(value["path"])
        self.commits.append((sorted(added), removed))


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if path.startswith("/lfs/"):
                assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
                hub.objects[path.removeprefix("/lfs/")] = body
                self._say(200, b"")
            elif path == "/api/validate-yaml":
                wrong = "license: unknown" in json.loads(body)["content"]
                said = {"errors": [{"message": "license is not one of apache-2.0, ..."}]} if wrong else {}
                self._say(400 if wrong else 200, said)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._say(401, {"error": "Invalid username or password."})
            elif path == "/api/whoami-v2":
                self._say(200, {"name": USER, "type": "user"})
            elif path == "/api/repos/create":
                given = json.loads(body)
                name = f"{given['organization'] or USER}/{given['name']}"
                exists = name in hub.repositories
                hub.repositories.setdefault(name, {".gitattributes": b""})
                if given.get("visibility") == "private" or given.get("private"):
                    hub.private.add(name)
                self._say(409 if exists else 200, {"url": f"{hub.url}/{name}"})
            else:
                self._of_repository(path, body)

        def _of_repository(self, path: str, body: bytes) -> None:
            whole = path.removeprefix("/api/models/")
            if whole in hub.repositories:
                siblings = [{"rfilename": file} for file in hub.repositories[whole]]
                self._say(200, {"id": whole, "private": whole in hub.private, "siblings": siblings})
                return
            found = re.fullmatch(
                r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(?:\.git)?/(tree|preupload|commit|resolve|info)/(.+)", path
            )
            if found is None or found[1] not in hub.repositories:
                self._say(404, {"error": f"{path} is not known"}, **{"X-Error-Code": "RepoNotFound"})
                return
            name, what, rest = found[1], found[2], found[3]
            files = hub.repositories[name]
            if what == "tree":
                self._say(
                    200, [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
                )
            elif what == "preupload":
                asked = json.loads(body)["files"]
                modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in asked}
                self._say(
                    200,
                    {
                        "files": [
                            {"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes.items()
                        ]
                    },
                )
            elif what == "info":
                objects = [
                    {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self._say(200, {"transfer": "basic", "objects": objects})
            elif what == "commit" and hub.refuses:
                self._say(hub.refuses, {"error": "You may not\nwrite here."})
            elif what == "commit":
                hub.commit(name, [json.loads(line) for line in body.splitlines()])
                number = len(hub.commits)
                self._say(200, {"commitUrl": f"{hub.url}/{name}/commit/{number}", "commitOid": f"{number:040d}"})
            else:
                file = files[rest.partition("/")[2]]
                headers = {"ETag": f'"{hashlib.sha256(file).hexdigest()}"', "X-Repo-Commit": "1" * 40}
                self._say(200, file, **headers)

        def _say(self, status: int, content: Any, **headers: str) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
