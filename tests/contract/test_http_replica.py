"""A server behind HTTP is a replica; the server is a toy that speaks as vLLM's does.

Damage shown: a server that has several engine cores and answers for one of them; one that is of an
earlier version, gone, or in trouble, and is taken for one that has done what it was asked.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from fleets import BUCKET, STATES, ToyReplica

from weightload import EngineLostError, Fleet, FleetError, UnsupportedError, UsageError
from weightload.vllm import HTTPReplica


class Server:
    """A toy engine behind HTTP.

    Attributes:
        engine: the engine.
        asked: method, path and query of every request.
        lacks: paths that this version does not have.
        broken: paths that answer with an error of the server.
        world: how many ranks there are; as many as answer, unless it is said.
    """

    def __init__(self):
        self.engine = ToyReplica("behind")
        self.asked, self.lacks, self.broken = [], set(), set()
        self.world = len(self.engine.ranks)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer()

            def do_POST(self):
                self.answer()

            def answer(self):
                found = urlparse(self.path)
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                outer.asked.append((self.command, found.path, parse_qs(found.query)))
                code, value = outer.handle(found.path, body)
                text = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def handle(self, path, body):
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        if path in self.broken:
            return 500, {"detail": "this server is broken"}
        if path == "/collective_rpc":
            operation = body["method"].removeprefix("weightload_")
            arguments = dict(body["kwargs"])
            if operation == "finish":
                assert arguments.pop("reset") == ["prefix", "multimodal", "encoder", "lora", "kv"]
            return 200, {"results": self.engine.call_plain(operation, arguments)}
        if path == "/get_world_size":
            return 200, {"world_size": self.world}
        if path == "/update_weight_version":
            self.engine.version = int(body["new_version"])
        elif path == "/reset_prefix_cache":
            self.engine.publish(None)
        elif path in ("/pause", "/resume"):
            getattr(self.engine, path[1:])()
        return 200, {"success": True}

    def stop(self):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.stop()


def fleet_of(server, **options):
    return Fleet([HTTPReplica(server.url, **options)], deadline=60, bucket_bytes=BUCKET)


def test_a_server_is_updated_through_what_vllm_offers(server):
    fleet = fleet_of(server)
    fleet.update(STATES[2], version=2)
    assert server.engine.serves() == 2
    assert server.engine.version == 2
    paths = [path for _, path, _ in server.asked if path != "/collective_rpc"]
    assert paths == [
        "/get_world_size", "/pause", "/reset_prefix_cache", "/reset_mm_cache",
        "/reset_encoder_cache", "/update_weight_version", "/resume",
    ]  # fmt: skip
    [query] = [query for _, path, query in server.asked if path == "/pause"]
    assert query == {"mode": ["wait"], "clear_cache": ["true"]}


def test_a_caller_who_pauses_by_himself_is_left_to_it(server):
    fleet_of(server, pause=None).update(STATES[2], version=2)
    assert not {"/pause", "/resume"} & {path for _, path, _ in server.asked}
    assert server.engine.serves() == 2


def test_a_server_that_answers_for_some_of_its_ranks_is_refused(server):
    server.world = 4
    with pytest.raises(FleetError) as caught:
        fleet_of(server).update(STATES[2], version=2)
    assert type(caught.value.__cause__) is UnsupportedError
    assert "has 4 ranks and answers for 2" in str(caught.value)
    assert caught.value.model_intact
    assert server.engine.serves() == 1


def test_a_server_that_was_left_with_caches_of_other_weights_drops_them(server):
    """Its fleet was lost after it had committed; it had no name for what it has now."""
    server.engine.pause()
    for operation, arguments in (
        ("start", {"commit": "atomic"}),
        ("load", {"weights": list(STATES[2].items())}),
        ("finish", {}),
    ):
        server.engine.call(operation, opener="gone", **arguments)
    fleet_of(server).abort()
    assert server.engine.serves() == 2
    assert "/update_weight_version" not in {path for _, path, _ in server.asked}


def test_an_earlier_version_has_no_place_for_the_version(server):
    server.lacks = {"/update_weight_version", "/reset_encoder_cache"}
    fleet_of(server).update(STATES[2], version=2)
    assert server.engine.serves() == 2


@pytest.mark.parametrize(
    ("path", "serves"),
    [("/pause", 1), ("/reset_prefix_cache", None), ("/update_weight_version", None)],
)
def test_what_the_server_cannot_do_it_has_not_done(path, serves, server):
    server.broken = {path}
    with pytest.raises(FleetError, match=r"gave 500: .*this server is broken"):
        fleet_of(server).update(STATES[2], version=2)
    assert server.engine.serves() == serves
    server.broken = set()
    fleet_of(server).update(STATES[3], version=3)
    assert server.engine.serves() == 3


def test_a_server_that_nobody_runs_is_lost():
    server = Server()
    server.stop()
    with pytest.raises(EngineLostError, match="Nobody listens at http://127"):
        HTTPReplica(server.url).call("status")


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="pause is 'wait'"):
        HTTPReplica("http://127.0.0.1:1", pause="maybe")
