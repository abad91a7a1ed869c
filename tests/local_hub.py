"""A stand-in for the Hugging Face Hub: its HTTP interface, as far as huggingface_hub needs it to
create a repository, commit files and load them again. It keeps everything in memory."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import yaml

TOKEN = "hf_s3cr3t"
USER = "me"


class LocalHub(ThreadingHTTPServer):
    """Repositories by name: whether they are private, their branches and their commits.

    Attributes:
        commits: For each repository and hash, the message and the files {path: content}.
        requests: Each request's method and path.
        refusals: Patterns of "METHOD path" to which the answer is 500.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.visibility, self.branches, self.commits = {}, {}, {}
        self.objects, self.requests, self.refusals = {}, [], []
        self.lock = threading.Lock()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self):
        """For a process that uses this as the Hub."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def files(self, repository, revision="main"):
        """The files of a branch or commit."""
        return self.commits[repository][self.hash_of(repository, revision)][1]

    def hash_of(self, repository, revision):
        return self.branches[repository].get(revision, revision)

    def log(self, repository):
        """The messages of all commits, in their order."""
        return [message for message, _ in self.commits[repository].values()]

    def create(self, repository, visibility):
        self.visibility[repository], self.commits[repository] = visibility, {}
        self.branches[repository] = {"main": self.add(repository, "initial commit", {})}

    def add(self, repository, message, files):
        number = len(self.commits[repository])
        commit = hashlib.sha1(f"{repository} {number}".encode()).hexdigest()
        self.commits[repository][commit] = (message, files)
        return commit


class _Answer(BaseHTTPRequestHandler):
    """One request. Each route is a pattern of its method and path, with the function for it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.partition("?")[0])
        line = f"{self.command} {path}"
        self.server.requests.append(line)
        if any(re.search(pattern, line) for pattern in self.server.refusals):
            return self.reply({"error": "broken"}, status=500)
        for pattern, method in ROUTES.items():
            if found := re.fullmatch(pattern, line):
                with self.server.lock:
                    return method(self, *found.groups())
        return self.reply({"error": f"no route for {line}"}, status=404)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def reply(self, content, status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def may_write(self):
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.reply({"error": "Invalid username or password."}, status=401)
        return False

    def json(self):
        return json.loads(self.body)

    def who_am_i(self):
        if self.may_write():
            self.reply({"name": USER, "type": "user", "orgs": []})

    def create_repository(self):
        if not self.may_write():
            return
        wanted = self.json()
        name = f"{wanted['organization'] or USER}/{wanted['name']}"
        status = 409 if name in self.server.commits else 200
        if status == 200:
            self.server.create(name, wanted.get("visibility", "public"))
        url = f"{self.server.endpoint}/{name}"
        self.reply({"url": url, "name": name, "id": name}, status=status)

    def validate(self):
        header = re.match(r"---\n(.*?)\n---\n", self.json()["content"], re.DOTALL)
        warnings = [] if header else [{"message": "empty or missing yaml metadata"}]
        codes = (yaml.safe_load(header[1]).get("language") if header else None) or []
        wrong = [code for code in codes if not re.fullmatch("[a-z]{2,3}", str(code))]
        errors = [{"message": f'"language" with value "{code}" is not valid.'} for code in wrong]
        self.reply({"errors": errors, "warnings": warnings}, status=400 if errors else 200)

    def create_branch(self, repository, branch):
        if not self.may_write():
            return
        branches = self.server.branches[repository]
        if branch in branches:
            self.reply({"error": "Reference already exists"}, status=409)
            return
        branches[branch] = branches["main"]
        self.reply({})

    def preupload(self, repository, revision):
        if not self.may_write():
            return
        if revision not in self.server.branches[repository]:
            self.reply({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            return
        modes = []
        for file in self.json()["files"]:
            large = file["path"].endswith((".safetensors", ".bin", ".pt", ".pth", ".png"))
            mode = "lfs" if large else "regular"
            modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        self.reply({"files": modes})

    def lfs_batch(self, repository):
        if not self.may_write():
            return
        objects = self.json()["objects"]
        for one in objects:
            if one["oid"] not in self.server.objects:
                one["actions"] = {"upload": {"href": f"{self.server.endpoint}/lfs/{one['oid']}"}}
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:  # the file changed while it was read
            self.reply({"error": "The content does not match its hash"}, status=400)
            return
        self.server.objects[oid] = self.body
        self.reply({})

    def commit(self, repository, revision):
        if not self.may_write():
            return
        files, message = dict(self.server.files(repository, revision)), ""
        for operation in map(json.loads, self.body.splitlines()):
            value = operation["value"]
            if operation["key"] == "header":
                message = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise NotImplementedError(operation["key"])
        commit = self.server.add(repository, message, files)
        self.server.branches[repository][revision] = commit
        url = f"{self.server.endpoint}/{repository}/commit/{commit}"
        self.reply({"commitUrl": url, "commitOid": commit})

    def describe(self, repository, revision="main"):
        if repository not in self.server.commits:
            self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return
        files = self.server.files(repository, revision)
        self.reply(
            {
                "id": repository,
                "sha": self.server.hash_of(repository, revision),
                "private": self.server.visibility[repository] == "private",
                "siblings": [{"rfilename": path} for path in files],
                "tags": [],
            }
        )

    def tree(self, repository, revision, folder):
        files = self.server.files(repository, revision)
        inside = [path for path in files if path.startswith(f"{folder}/" if folder else "")]
        if folder and not inside:
            self.reply({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        self.reply(
            [
                {"type": "file", "path": path, "size": len(files[path]), "oid": "1"}
                for path in inside
            ]
        )

    def resolve(self, repository, revision, path):
        if repository not in self.server.commits:
            self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return
        commit = self.server.hash_of(repository, revision)
        if commit not in self.server.commits[repository]:
            self.reply({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            return
        content = self.server.files(repository, commit).get(path)
        if content is None:
            headers = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": commit}
            self.reply({"error": "Entry not found"}, 404, **headers)
            return
        etag = hashlib.sha256(content).hexdigest()
        self.reply(content, ETag=f'"{etag}"', X_Repo_Commit=commit)


REPOSITORY = r"([^/]+/[^/]+)"
ROUTES = {
    r"GET /api/whoami-v2": _Answer.who_am_i,
    r"POST /api/repos/create": _Answer.create_repository,
    r"POST /api/validate-yaml": _Answer.validate,
    rf"POST /api/models/{REPOSITORY}/branch/(.+)": _Answer.create_branch,
    rf"POST /api/models/{REPOSITORY}/preupload/(.+)": _Answer.preupload,
    rf"POST /{REPOSITORY}\.git/info/lfs/objects/batch": _Answer.lfs_batch,
    r"PUT /lfs/(\w+)": _Answer.lfs_upload,
    rf"POST /api/models/{REPOSITORY}/commit/(.+)": _Answer.commit,
    rf"GET /api/models/{REPOSITORY}/tree/([^/]+)/?(.+)?": _Answer.tree,
    rf"GET /api/models/{REPOSITORY}": _Answer.describe,
    rf"GET /api/models/{REPOSITORY}/revision/(.+)": _Answer.describe,
    rf"(?:GET|HEAD) /{REPOSITORY}/resolve/([^/]+)/(.+)": _Answer.resolve,
}


@contextmanager
def serving():
    """A Hub that answers until the end of the block."""
    with LocalHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=[0.02], daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
