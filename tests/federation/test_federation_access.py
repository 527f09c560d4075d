"""Who gets in: real processes, TLS and keys on, over an address that others could use."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from federation_processes import Federation, process_tree
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from corefed.federation.engine.conversation import BODY
from corefed.federation.operate import certificates, processes, registering
from corefed.federation.operate.folder import ServerFolder
from corefed.settings.config import resolve
from corefed.training import record

pytestmark = pytest.mark.federation


@pytest.fixture
def points(fed: Federation) -> Path:
    return fed.path.parent / "bob.npz"


@pytest.fixture
def server(fed: Federation) -> ServerFolder:
    return ServerFolder.read(fed.path)


@pytest.fixture
def abroad(server: ServerFolder) -> str:
    """An address of this machine at which a request does not come from the machine itself."""
    if server.address.host == "127.0.0.1":
        pytest.skip("this machine has no address but the loopback")
    return server.address.host


def key_of(fed: Federation, name: str) -> ec.EllipticCurvePrivateKey:
    content = (fed.path / "clients" / name / "key").read_bytes()
    key = serialization.load_ssh_private_key(content, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def fleet(
    server: ServerFolder, signing: ec.EllipticCurvePrivateKey, shown: ec.EllipticCurvePublicKey
) -> FleetHttpClient:
    """The clients' API, as somebody with this key who shows that one."""
    return FleetHttpClient.from_server_address(
        str(server.address),
        False,
        (server.path / "ca.crt").read_bytes(),
        interceptors=[NodeAuthHttpInterceptor(signing, shown)],
    )


def activate(key: ec.EllipticCurvePublicKey) -> ActivateNodeRequest:
    return ActivateNodeRequest(public_key=public_key_to_bytes(key), heartbeat_interval=30)


def refused(call: Any, request: Any) -> int:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        call(request)
    return caught.value.response.status_code


# Keys


def test_an_unregistered_key_is_refused(server: ServerFolder) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with fleet(server, key, key.public_key()) as client:
        assert refused(client.ActivateNode, activate(key.public_key())) == 412


def test_a_public_key_without_its_private_key_is_refused(
    fed: Federation, server: ServerFolder
) -> None:
    mine, alice = ec.generate_private_key(ec.SECP384R1()), key_of(fed, "alice").public_key()
    with fleet(server, mine, alice) as client:
        assert refused(client.ActivateNode, activate(alice)) == 401


def test_a_registered_client_is_nobody_else(fed: Federation, server: ServerFolder) -> None:
    bob = key_of(fed, "bob")
    nodes = registering.list_nodes(server)
    hers, his = (
        int(nodes[public_key_to_bytes(key_of(fed, name).public_key())].number)
        for name in ("alice", "bob")
    )
    reply = Message(metadata=Metadata(src_node_id=hers))
    with fleet(server, bob, bob.public_key()) as client:
        request = PullMessagesRequest(node=Node(node_id=hers))
        assert refused(client.PullMessages, request) == 401
        pushed = PushMessagesRequest(node=Node(node_id=his), messages_list=[reply])
        assert refused(client.PushMessages, pushed) == 403


def test_a_client_with_a_wrong_key_is_told_so(
    fed: Federation, server: ServerFolder, points: Path, tmp_path: Path
) -> None:
    """The whole program: it says what is wrong, and Flower's SuperNode is not let in."""
    folder = shutil.copytree(fed.path / "clients" / "carol", tmp_path / "carol")
    (folder / "key").write_bytes(certificates.make_node_key().key)
    process = fed.client(folder, points)
    fed.others.append(process.start())
    process.wait_for("The server refuses the key of carol: it is not registered there")
    process.gone()
    assert "412" in fed.server.said()
    assert registering.client_states(server)["carol"] == "registered"  # which means: never seen


def test_a_client_with_another_federations_ca_does_not_talk(
    fed: Federation, points: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(fed.path / "clients" / "carol", tmp_path / "carol")
    (folder / "ca.crt").write_bytes(certificates.make_authority("another").public)
    process = fed.client(folder, points)
    fed.others.append(process.start())
    assert process.wait() == 2
    assert "does not vouch for" in process.said()
    assert "corefed.federation.engine.node" not in process.said()  # no SuperNode was started


# The network


def test_plain_http_gets_no_answer(server: ServerFolder) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()


def test_the_server_shows_a_certificate_of_its_own_authority(server: ServerFolder) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        _get(server, server.address.host, "/health", ssl.create_default_context())
    assert _get(server, server.address.host, "/health") == 200


def _get(server: ServerFolder, host: str, path: str, context: ssl.SSLContext | None = None) -> int:
    context = context or ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    port = server.address.port
    connection = http.client.HTTPSConnection(host, port, timeout=20, context=context)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def _post(server: ServerFolder, host: str, path: str, headers: dict[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    with httpx.Client(verify=context, timeout=20) as client:
        content = {"content-type": "application/protobuf", **(headers or {})}
        url = f"https://{host}:{server.address.port}{path}"
        return client.post(url, content=b"", headers=content).status_code


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/control/list-runs",
        "/v1/control/stop-run", "/v1/runtime/acquire-task", "/v1/runtime/get-nodes",
        "//v1/control/list-runs", "/v1/fleet/../control/list-runs", "/v1/Control/list-runs",
    ],
)  # fmt: skip
def test_the_operators_api_is_closed_at_the_open_port(
    server: ServerFolder, abroad: str, path: str
) -> None:
    """Also to this machine, so that a tunnel or proxy that ends here opens nothing."""
    spoofed = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1"}
    for headers in ({}, spoofed):
        for host in (abroad, "127.0.0.1"):
            assert _post(server, host, path, headers) == 403


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/"])
def test_nothing_else_is_shown_at_the_open_port(
    server: ServerFolder, abroad: str, path: str
) -> None:
    assert _get(server, abroad, path) == _get(server, "127.0.0.1", path) == 403


def test_superlink_itself_is_at_no_address_of_the_network(
    server: ServerFolder, abroad: str
) -> None:
    port = processes.link_address(server).port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((abroad, port), timeout=10)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_the_clients_api_is_open_to_other_machines(server: ServerFolder, abroad: str) -> None:
    # 401: authentication answers, so the request came through the gate.
    assert _post(server, abroad, "/v1/fleet/pull-messages") == 401
    assert _get(server, abroad, "/health") == 200


def test_the_operators_commands_reach_superlink(server: ServerFolder) -> None:
    assert registering.client_states(server)["alice"] == "online"


def test_a_large_body_is_refused_without_being_read(fed: Federation, server: ServerFolder) -> None:
    assert fed.server.process is not None
    before = _memory(fed.server.process.pid)
    for chunked in (False, True):
        assert _send(server, 8 * BODY, chunked=chunked) == 413
    # A body whose length is not declared is read up to the bound, and no further.
    assert _memory(fed.server.process.pid) - before < 2 * BODY
    fed.server.wait_for("413 to ")
    assert _get(server, server.address.host, "/health") == 200


def _send(server: ServerFolder, size: int, *, chunked: bool) -> int:
    """Send zeros until the server has had enough; the status it answers."""
    context = ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{length}\r\n"
    piece = bytes(1 << 16)
    data = b"10000\r\n" + piece + b"\r\n" if chunked else piece
    sent = 0
    with (
        socket.create_connection(server.address, timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=server.address.host) as secure,
    ):
        secure.sendall(f"{head}content-type: application/protobuf\r\n\r\n".encode())
        try:
            while sent < size:
                secure.sendall(data)
                sent += len(piece)
        except OSError:
            pass  # it closed the connection; what it said can still be read
        words = secure.recv(1 << 12)
    return int(words.split()[1])


def _memory(pid: int) -> int:
    """Resident bytes of a process and all that it started."""
    total = 0
    for each in process_tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


# Code that somebody submits

EVIL = """\
import pathlib, os
pathlib.Path({mark!r}).with_name("ran-" + str(os.getpid())).write_text("ran")
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
client_app = ClientApp()
server_app = ServerApp()
"""


def test_code_in_a_submitted_bundle_runs_nowhere(
    fed: Federation, server: ServerFolder, tmp_path: Path
) -> None:
    """The bundle has code that leaves a file when it is imported; the training goes its own way."""
    mark = tmp_path / "marks" / "ran"
    mark.parent.mkdir()
    app = shutil.copytree(server.path / "app", tmp_path / "app")
    (app / "evil.py").write_text(EVIL.format(mark=str(mark)))
    toml = (app / "pyproject.toml").read_text().replace("corefed_app:", "evil:")
    (app / "pyproject.toml").write_text(toml)
    experiment = resolve(server.path / record.EXPERIMENT)
    record.Folder(server.runs / "evil").create(experiment)

    processes.run_flwr(server, "run", str(app), processes.LINK, "--run-config", 'run="evil"')
    until = time.monotonic() + 90
    while not (server.runs / "evil" / record.SUMMARY).exists() and time.monotonic() < until:
        time.sleep(0.2)
    _, lines = record.read(server.runs / "evil")
    assert lines[0]["federation"]["accepted"] == ["alice", "bob"]  # so they had the bundle
    assert list(mark.parent.iterdir()) == []
    for home in (server.path / "flower", fed.path / "clients" / "alice" / "flower"):
        assert not [path for path in home.rglob("*") if "evil" in path.name or path.name == "apps"]


# Other users of the same machine


def test_a_token_and_a_secret_are_on_no_command_line(fed: Federation) -> None:
    """SuperExec passes them on within its own family; `ps` shows commands to every user."""
    client = fed.clients["alice"].process
    assert client is not None
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process_tree(client.pid)]
    assert len(words) >= 4  # command, SuperNode, SuperExec, its nursery
    assert not any(b"--token\0" in each for each in words)
    home = fed.path / "clients" / "alice" / "flower"
    assert home.stat().st_mode & 0o077 == 0
    for name in (processes.SECRET, "own.key"):
        assert (home / name).stat().st_mode & 0o077 == 0
    secret = (home / processes.SECRET).read_bytes()
    assert len(secret) == 32 and not any(secret in each for each in words)


@pytest.mark.parametrize("secret", [None, b"a guess"])
def test_a_stranger_on_the_machine_gets_no_task_and_answers_none(
    fed: Federation, server: ServerFolder, secret: bytes | None
) -> None:
    """The runtime APIs of a client and of the server are on the loopback, where all can reach them.

    Asked for a task without the executor's secret, and for what only a task's own process may do.
    """
    home = fed.path / "clients" / "alice" / "flower"
    (line,) = [
        line for line in fed.clients["alice"].said().splitlines() if "--runtime-api-address" in line
    ][-1:]
    client = line.split("--runtime-api-address ")[1].split()[0]
    places = {
        client: home / "own-ca.crt",
        str(processes.link_address(server)): server.path / "ca.crt",
    }
    for address, authority in places.items():
        for token in (None, "0" * 64):
            stranger = runtime(address, authority, secret, token)
            with stranger:
                request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                assert refused(stranger.AcquireTask, request) == 401
                assert refused(stranger.PullTaskInput, PullTaskInputRequest()) == 401
                assert refused(stranger.PullMessages, PullAppMessagesRequest()) == 401
                assert refused(stranger.PushMessages, PushAppMessagesRequest()) == 401
                assert refused(stranger.PushObject, PushObjectRequest()) == 401
                assert refused(stranger.PushTaskOutput, PushTaskOutputRequest()) == 401
    # Who has the secret is asked in: the requests above were right in all else.
    own = runtime(client, home / "own-ca.crt", (home / processes.SECRET).read_bytes(), None)
    with own:
        assert not own.AcquireTask(AcquireTaskRequest(supported_task_types=[])).token


def runtime(
    address: str, authority: Path, secret: bytes | None, token: str | None
) -> RuntimeHttpClient:
    """The API of Flower's own processes, as somebody with this secret and this token."""
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret is not None:
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        interceptors.append(
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        )
    if token is not None:
        interceptors.append(RuntimeTokenHttpInterceptor(token))
    return RuntimeHttpClient.from_server_address(
        address, False, authority.read_bytes(), interceptors=interceptors
    )


def test_a_program_that_poses_as_a_clients_own_is_not_believed(fed: Federation) -> None:
    """Its executor speaks only to who shows the certificate that was made for this start."""
    said = fed.clients["alice"].said()
    (line,) = [line for line in said.splitlines() if "engine.warm" in line][-1:]
    home = fed.path / "clients" / "alice" / "flower"
    assert f"--root-certificates {home / 'own-ca.crt'}" in line
    assert "--insecure" not in line


# Coming and going


def test_keys_that_come_and_go(fed: Federation, server: ServerFolder) -> None:
    """The folder is the list: a running server follows it, and the training reads it."""
    keys, toml = server.path / "clients", server.path / "federation.toml"
    before = toml.read_bytes()
    kept = (keys / "carol.pub").read_bytes()
    (keys / "carol.pub").unlink()
    assert list(server.keys().values()) == ["alice", "bob"]
    assert registering.client_states(server)["carol"] == "excluded"
    (keys / "carol.pub").write_bytes(kept)
    assert registering.client_states(server)["carol"] == "registered"  # no harm was done

    assert fed.command("add", "dave")[0] == 0
    fed.server.wait_for("dave is registered")
    code, words = fed.command("remove", "dave")
    assert (code, "taken off for good" in words) == (0, True)
    fed.server.wait_for("dave gets no tasks any more")
    dave = key_of(fed, "dave")
    with fleet(server, dave, dave.public_key()) as client:
        assert refused(client.ActivateNode, activate(dave.public_key())) == 412
    (keys / "dave.pub").write_bytes((fed.path / "clients" / "dave" / "key.pub").read_bytes())
    fed.server.wait_for("dave has a key that was taken off for good")
    (keys / "dave.pub").unlink()  # and all as it was, for the tests that follow
    toml.write_bytes(before)


def test_a_killed_client_rejoins_at_once(fed: Federation, server: ServerFolder) -> None:
    """Flower alone would refuse it until its old session has run out."""
    client = fed.clients["alice"]
    client.kill9()
    assert registering.client_states(server)["alice"] == "online"  # the server cannot know yet
    began = time.monotonic()
    client.start().wait_for("SuperNode ID:")
    assert "Failed to activate" not in client.said()
    assert registering.client_states(server)["alice"] == "online"
    assert time.monotonic() - began < 60


def test_a_server_ends_what_it_started_and_keeps_what_it_knows(
    fed: Federation, server: ServerFolder
) -> None:
    """Asked to end, as by a service manager, and started again: the same clients reconnect."""
    nodes = registering.list_nodes(server)
    assert fed.server.process is not None
    started = process_tree(fed.server.process.pid)
    assert len(started) >= 5  # command, SuperLink, SuperExec, its nursery, the gate
    assert fed.server.stop() == 0
    until = time.monotonic() + 15
    while any(_alive(pid) for pid in started) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in started if _alive(pid)]
    fed.server.start()
    fed.wait_ready()
    after = registering.list_nodes(server)
    assert {key: node.number for key, node in after.items()} == {
        key: node.number for key, node in nodes.items()
    }
    until = time.monotonic() + 60  # offline until its next heartbeat, where the stop took long
    while registering.client_states(server)["alice"] != "online":
        assert time.monotonic() < until
        time.sleep(0.5)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_folder_has_one_server_and_a_client_one_process(fed: Federation) -> None:
    for process in (fed.server, fed.clients["alice"]):
        done = subprocess.run(process.command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "Another process is at work" in done.stderr
