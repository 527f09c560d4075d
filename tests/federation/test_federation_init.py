"""A new federation's folder: what is in it, who can read it, and what is refused."""

from __future__ import annotations

import configparser
import dataclasses
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from commands import corefed
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from corefed.base.errors import UserError
from corefed.federation.engine import gate
from corefed.federation.operate import certificates, creating, folder
from corefed.federation.operate.address import Address
from corefed.federation.operate.folder import ClientFolder, ServerFolder
from corefed.federation.rules import Rules
from corefed.settings.config import resolve

NAMES = ["alice", "bob", "carol-2"]
SECRETS = {"key", "ca.key", "server.key"}
OWN = {"federation.toml", "experiment.toml", "client.toml"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("init") / "fed"
    old = os.umask(0)  # the modes must not lean on it
    try:
        result = corefed(
            "federation", "init", path, "--clients", *NAMES, "--address", "example.org:8123",
            "--set", "method=fedavg",
        )  # fmt: skip
    finally:
        os.umask(old)
    assert result.code == 0, result.err
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "fed")


def test_the_files_of_a_federation(made: Path) -> None:
    found = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    own = {"client.toml", "ca.crt", "key", "key.pub", "start.sh", "corefed-client.service"}
    server = {
        "federation.toml", "experiment.toml", "ca.crt", "ca.key", "server.crt", "server.key",
        "start.sh", "corefed-server.service", "app/pyproject.toml", "app/corefed_app.py",
        *(f"clients/{name}.pub" for name in NAMES),
    }  # fmt: skip
    wanted = {"README.md", *(f"server/{name}" for name in server)}
    assert found == wanted | {f"clients/{name}/{each}" for name in NAMES for each in own}


def test_nothing_secret_can_be_read_by_others(made: Path) -> None:
    for path in [made, *made.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.name in SECRETS or path.name in OWN:
            assert mode == 0o600, path
    for path in made.rglob("*"):
        if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
            assert path.name in SECRETS


def test_an_init_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> certificates.KeyPair:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificates, "make_node_key", fails)
    with pytest.raises(UserError, match="No space left"):
        creating.create(tmp_path / "fed", ["a"], "localhost:8000")
    assert list(tmp_path.iterdir()) == []


def test_the_same_names_give_the_same_files_with_other_keys(made: Path, tmp_path: Path) -> None:
    creating.create(tmp_path / "fed", NAMES, "example.org:8123", assignments=["method=fedavg"])
    for path in made.rglob("*"):
        twin = tmp_path / "fed" / path.relative_to(made)
        assert twin.exists()
        if path.is_file() and path.suffix in (".toml", ".sh", ".service", ".py", ".md"):
            assert twin.read_bytes() == path.read_bytes(), path
        elif path.is_file():
            assert twin.read_bytes() != path.read_bytes(), path
    keys = [path.read_bytes() for path in made.glob("clients/*/key")]
    assert len(set(keys)) == len(NAMES)


def test_the_server_reads_what_init_wrote(made: Path) -> None:
    for path in (made, made / "server"):
        server = ServerFolder.read(path)
        assert server.path == made / "server"
        assert server.clients == tuple(NAMES)
        assert server.rules == Rules()
        assert (str(server.address), server.bind) == ("example.org:8123", "0.0.0.0")
        assert str(server.own_address) == "127.0.0.1:8123"
    values = tomllib.loads((made / "server" / "experiment.toml").read_text())
    assert (values["data"], values["clients"], values["method"]) == ("local", 3, "fedavg")
    assert resolve(made / "server" / "experiment.toml").run.clients == 3


def test_every_rule_stands_there_with_what_it_does(made: Path) -> None:
    text = (made / "server" / "federation.toml").read_text()
    lines = text.splitlines()
    for field in dataclasses.fields(Rules):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{field.name} = "))
        assert lines[at - 1].startswith("# ")
    assert "Seconds a round waits for answers" in text


def test_rules_may_be_given_at_once(tmp_path: Path) -> None:
    given = ["--rule", "quorum=1.0", "--rule", "aggregation=median", "--rule", "difference=true"]
    result = corefed("federation", "init", tmp_path / "fed", "--clients", "a", *given)
    assert result.code == 0, result.err
    wanted = Rules(quorum=1.0, aggregation="median", difference=True)
    assert ServerFolder.read(tmp_path / "fed").rules == wanted


def test_a_client_reads_its_folder_wherever_it_is(made: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(made / "clients" / "bob", tmp_path / "elsewhere")
    client = ClientFolder.read(moved)
    assert (client.name, str(client.address)) == ("bob", "example.org:8123")
    assert client.about.share_metrics
    assert client.data == folder.Data()
    assert client.privacy == folder.Privacy()


def test_a_key_is_what_flower_calls_the_client(made: Path) -> None:
    server = ServerFolder.read(made)
    for name in NAMES:
        private = serialization.load_ssh_private_key(
            (made / "clients" / name / "key").read_bytes(), None
        )
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert server.keys()[public_key_to_bytes(private.public_key())] == name
    if shutil.which("ssh-keygen"):
        path = made / "clients" / "alice" / "key"
        shown = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, check=True)
        assert shown.stdout.split()[:2] == path.with_suffix(".pub").read_bytes().split()[:2]


def test_a_client_may_make_its_own_key(copy: Path) -> None:
    pub = copy / "server" / "clients" / "alice.pub"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", copy / "own"],
        check=True,
    ) if shutil.which("ssh-keygen") else (copy / "own.pub").write_bytes(
        certificates.make_node_key().public
    )
    shutil.copy(copy / "own.pub", pub)
    assert sorted(ServerFolder.read(copy).keys().values()) == sorted(NAMES)


def test_a_client_without_its_public_key_is_not_admitted(copy: Path) -> None:
    (copy / "server" / "clients" / "bob.pub").unlink()
    assert list(ServerFolder.read(copy).keys().values()) == ["alice", "carol-2"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"ssh-ed25519 AAAA me\n"])
def test_what_is_no_key_is_refused(copy: Path, content: bytes) -> None:
    (copy / "server" / "clients" / "bob.pub").write_bytes(content)
    with pytest.raises(UserError, match=r"bob.pub is no public key that Flower takes"):
        ServerFolder.read(copy).keys()


def test_two_clients_with_one_key_are_refused(copy: Path) -> None:
    keys = copy / "server" / "clients"
    shutil.copy(keys / "alice.pub", keys / "bob.pub")
    with pytest.raises(UserError, match="is the key of alice too"):
        ServerFolder.read(copy).keys()


# Certificates


def handshake(context: ssl.SSLContext, made: Path, host: str) -> str:
    """Whom a client believes to talk to, over a real connection."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made / "server" / "server.crt", made / "server" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with plain:
                try:
                    server.wrap_socket(plain, server_side=True).close()
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return str(secure.version())
        finally:
            thread.join()


@pytest.mark.parametrize("host", ["example.org", "localhost", "127.0.0.1", "::1"])
def test_the_certificate_is_good_for_the_address_and_for_this_machine(
    made: Path, host: str
) -> None:
    context = ssl.create_default_context(cafile=str(made / "clients" / "alice" / "ca.crt"))
    assert handshake(context, made, host) == "TLSv1.3"


def test_the_certificate_is_good_for_nothing_else(made: Path, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(made / "server" / "ca.crt"))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(context, made, "evil.org")
    creating.create(tmp_path / "other", ["a"], "example.org:8123")
    strange = ssl.create_default_context(cafile=str(tmp_path / "other" / "server" / "ca.crt"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(strange, made, "example.org")


def test_how_long_certificates_last(made: Path) -> None:
    ca, shown = (
        certificates.days_left((made / "server" / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    assert (round(ca), round(shown)) == (3650, 730)
    certificate = x509.load_pem_x509_certificate((made / "server" / "ca.crt").read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca and constraints.path_length == 0


def test_a_server_with_an_expired_certificate_says_how_to_renew_it(copy: Path) -> None:
    server = copy / "server"
    ca = certificates.KeyPair((server / "ca.key").read_bytes(), (server / "ca.crt").read_bytes())
    expired = certificates.sign_server(ca, "example.org", days=0)
    (server / "server.crt").write_bytes(expired.public)
    (server / "server.key").write_bytes(expired.key)
    result = corefed("federation", "server", copy)
    assert result.code == 2
    assert "has expired; type: corefed federation renew" in result.err
    assert corefed("federation", "renew", copy).code == 0
    context = ssl.create_default_context(cafile=str(copy / "clients" / "bob" / "ca.crt"))
    assert handshake(context, copy, "example.org") == "TLSv1.3"
    assert (server / "server.key").stat().st_mode & 0o077 == 0
    (server / "ca.key").unlink()
    assert "no" in corefed("federation", "renew", copy).err
    assert ServerFolder.read(copy)  # which needs no ca.key


# What is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--clients", "a", "b", "a"], "'a' is there twice"),
        (["--clients", "Alice"], "'Alice' (clients) is no name for a client"),
        (["--clients", "../a"], "is no name for a client"),
        (["--clients", "a" * 33], "is no name for a client"),
        (["--clients"], "Missing option '--clients'"),
        (["--clients", ","], "There are no clients"),
        (["--clients", "a", "--address", "here"], "it must be HOST:PORT"),
        (["--clients", "a", "--address", "here:99999"], "it must be HOST:PORT"),
        (["--clients", "a", "--address", "https://here:80"], "it must be HOST:PORT"),
        (["--clients", "a", "--address", "0.0.0.0:80"], "by which clients reach the server"),
        (["--clients", "a", "--set", "seeds=0,1"], "trains with one seed"),
        (["--clients", "a", "--set", "cohort=2"], "cohort is 2"),
        (["--clients", "a", "--set", "methd=fedavg"], "did you mean 'method'"),
        (["--clients", "a", "--config", "missing.toml"], "Cannot read missing.toml"),
        (["--clients", "a", "--rule", "quorum"], "is not written key=value"),
        (["--clients", "a", "--rule", "qorum=1"], "did you mean 'quorum'"),
        (["--clients", "a", "--rule", "quorum=2"], "quorum (--rule) is 2"),
    ],
)
def test_mistakes_of_init(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = corefed("federation", "init", tmp_path / "fed", *arguments)
    assert result.code == 2
    assert sentence in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = corefed("federation", "init", tmp_path, "--clients", "a")
    assert result.code == 2
    assert "is not empty" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_clients_by_words_by_commas_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()  # an empty folder is as good as none
    for name, words in (("1", ["a", "b", "c"]), ("2", ["a,b", "c"])):
        arguments = ["--address", "h:1", "--clients", *words]
        assert corefed("federation", "init", tmp_path / name, *arguments).code == 0
        assert ServerFolder.read(tmp_path / name).clients == ("a", "b", "c")


def test_init_says_what_a_federation_changes_in_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('data = "mnist"\nclients = 20\nrounds = 7\n')
    path = tmp_path / "fed"
    result = corefed(
        "federation", "init", path, "--clients", "a", "b", "--config", tmp_path / "mine.toml"
    )
    assert result.code == 0
    assert "data is local in a federation, not mnist" in result.err
    assert "clients is 2 in a federation, not 20" in result.err
    run = resolve(path / "server" / "experiment.toml").run
    assert (run.data, run.clients, run.rounds) == ("local", 2, 7)


@pytest.mark.parametrize("name", ["server/server.key", "server/ca.key"])
def test_a_server_refuses_secrets_that_others_can_read(copy: Path, name: str) -> None:
    (copy / name).chmod(0o640)
    result = corefed("federation", "server", copy)
    assert result.code == 2
    assert f"type: chmod 600 {copy / name}" in result.err


def test_a_client_refuses_a_key_that_others_can_read(copy: Path) -> None:
    key = copy / "clients" / "bob" / "key"
    key.chmod(0o604)
    result = corefed("federation", "client", key.parent, "--data", "x.npz")
    assert result.code == 2
    assert f"type: chmod 600 {key}" in result.err


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("server/federation.toml", ("deadline", "dead_line"), "did you mean 'deadline'"),
        ("server/federation.toml", ("quorum = 0.5", "quorum = 5"), "it must be above 0"),
        ("server/federation.toml", ("bind = ", "bnd = "), "did you mean 'bind'"),
        ("server/federation.toml", ('bind = ""', 'bind = "10.0.0.1"'), "it must be one of"),
        ("server/federation.toml", ("[rules]", "[rule]"), "has a table [rule]"),
        ("server/federation.toml", ("example.org:8123", "8123"), "it must be HOST:PORT"),
        ("server/federation.toml", ('"bob", ', '"bob", "bob", '), "is there twice"),
        ("server/federation.toml", ("[federation]", ""), "must stand in [federation]"),
        ("clients/bob/client.toml", ("device", "divice"), "did you mean 'device'"),
        ("clients/bob/client.toml", ("min_noise = 0.0", "min_noise = -1"), "0 or more"),
        ("clients/bob/client.toml", ("heartbeat = 10", "heartbeat = 5"), "between 10 and 1800"),
        ("clients/bob/client.toml", ("name = ", "# name = "), "has no 'name'"),
        ("clients/bob/client.toml", ("true", '"maybe"'), "must be true or false"),
        ("clients/bob/client.toml", ("[data]", "[data"), "is not valid TOML"),
    ],
)
def test_mistakes_in_the_files(
    copy: Path, name: str, change: tuple[str, str], sentence: str
) -> None:
    path = copy / name
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(UserError) as caught:
        ServerFolder.read(copy) if name.startswith("server") else ClientFolder.read(path.parent)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["client.toml", "ca.crt", "key"])
def test_a_client_without_a_file_says_what_to_copy(copy: Path, name: str) -> None:
    (copy / "clients" / "bob" / name).unlink()
    with pytest.raises(UserError, match="copy the client's whole folder"):
        ClientFolder.read(copy / "clients" / "bob")


def test_a_whole_federation_is_no_client(copy: Path) -> None:
    with pytest.raises(UserError, match="has the clients alice, bob, carol-2; name one"):
        ClientFolder.read(copy)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("example.org:80", ("example.org", 80)),
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("[fe80::1]:8000", ("fe80::1", 8000)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert Address.parse(text, "here") == address
    assert str(Address.parse(text, "here")) == text


@pytest.mark.parametrize(
    ("host", "bind", "own"),
    [
        ("localhost", "127.0.0.1", "127.0.0.1:7"),
        ("[::1]", "::1", "[::1]:7"),
        ("10.0.0.1", "0.0.0.0", "127.0.0.1:7"),
        ("[fe80::1]", "::", "[::1]:7"),
    ],
)
def test_where_a_server_listens(tmp_path: Path, host: str, bind: str, own: str) -> None:
    creating.create(tmp_path / "fed", ["a"], f"{host}:7")
    server = ServerFolder.read(tmp_path / "fed")
    assert (server.bind, str(server.own_address)) == (bind, own)


# Growing


def test_another_client(copy: Path) -> None:
    assert corefed("federation", "add", copy, "dave").code == 0
    server = ServerFolder.read(copy)
    assert server.clients == (*NAMES, "dave")  # at the end: numbers of the others stay
    assert list(server.keys().values())[-1] == "dave"
    assert ClientFolder.read(copy / "clients" / "dave").address == server.address
    assert (copy / "clients" / "dave" / "key").stat().st_mode & 0o077 == 0
    again = corefed("federation", "add", copy, "dave")
    assert (again.code, "is there twice" in again.err) == (2, True)
    shutil.rmtree(copy / "clients")  # copied away, as the README says
    assert corefed("federation", "add", copy / "server", "erin").code == 0
    assert (copy / "clients" / "erin" / "client.toml").exists()


def test_another_client_for_a_list_that_somebody_formatted(copy: Path) -> None:
    path = copy / "server" / "federation.toml"
    path.write_text(path.read_text().replace('"alice", "bob"', '\n  "alice",\n  "bob"'))
    before = sorted(copy.rglob("*"))
    result = corefed("federation", "add", copy, "dave")
    assert result.code == 2
    assert "write it at the end of `clients` yourself" in result.err
    assert sorted(copy.rglob("*")) == before


# Services


def test_services_are_what_systemd_reads(made: Path) -> None:
    for path in made.rglob("*.service"):
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(path)
        assert unit.sections() == ["Unit", "Service", "Install"]
        service = unit["Service"]
        place = service["ReadWritePaths"]
        assert service["ExecStart"].split()[0] == f"{place}/start.sh"
        assert service["User"] == "corefed"
        assert service["Restart"] == "on-failure"
        assert int(service["LimitNOFILE"]) > gate.limits_for(500).connections
        assert service["NoNewPrivileges"] == service["PrivateTmp"] == "true"
        assert service["ProtectSystem"] == "strict"
        if shutil.which("systemd-analyze"):
            done = subprocess.run(
                ["systemd-analyze", "verify", path], capture_output=True, text=True
            )
            known = [line for line in done.stderr.splitlines() if "start.sh" not in line]
            assert not known, done.stderr


def test_start_scripts_call_the_command_on_their_own_folder(made: Path, tmp_path: Path) -> None:
    fake = tmp_path / "corefed"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def said(*command: object) -> list[str]:
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        return done.stdout.splitlines()

    assert said(made / "server" / "start.sh") == ["federation", "server", str(made / "server")]
    bob = made / "clients" / "bob"
    assert said(bob / "start.sh", "/my data") == [
        "federation", "client", str(bob), "--data", "/my data",
    ]  # fmt: skip
    assert said(bob / "start.sh") == []


def test_the_readme_names_what_is_there(made: Path) -> None:
    text = (made / "README.md").read_text()
    for name in (*NAMES, "server.key", "ca.key", "example.org:8123", "ssh-keygen", "port 8123"):
        assert name in text
