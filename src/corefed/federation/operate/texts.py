"""What stands in the files of a new federation: settings, programs, services, the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from corefed.federation.operate.address import Address
from corefed.federation.operate.folder import FederationTable
from corefed.federation.rules import Rules
from corefed.settings import toml


def federation_toml(one: FederationTable, rules: Rules) -> str:
    """federation.toml, with every rule and what it does."""
    return f"[federation]\n{toml.written(one)}\n[rules]\n{toml.written(rules)}"


def clients_line(names: Sequence[str]) -> str:
    """The line of federation.toml that names the clients."""
    return f"\nclients = {json.dumps(list(names))}\n"


# The bundle that `flwr run` insists on. Neither the server nor a client reads what is in it.
APP = """\
[project]
name = "corefed"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "corefed"

[tool.flwr.app.components]
serverapp = "corefed_app:server_app"
clientapp = "corefed_app:client_app"

[tool.flwr.app.config]
run = ""
"""

APP_MODULE = '''\
"""Nothing: server and clients run corefed.federation.flower.app of their own installation."""

client_app = server_app = None
'''

SERVER_START = """\
#!/bin/sh
# Starts the federation's server; COREFED names the program where it is not on the PATH.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 1
exec "${COREFED:-corefed}" federation server "$here"
"""

CLIENT_START = """\
#!/bin/sh
# Starts this client: start.sh DATA. COREFED names the program where it is not on the PATH.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 1
exec "${COREFED:-corefed}" federation client "$here" --data "${1:?usage: start.sh DATA}"
"""

_UNIT = """\
# A systemd service. Change the paths and the user, then:
#   sudo cp {file} /etc/systemd/system/
#   sudo systemctl daemon-reload && sudo systemctl enable --now {service}
[Unit]
Description={what}
Wants=network-online.target
After=network-online.target

[Service]
User=corefed
Environment=COREFED=/opt/corefed/bin/corefed
ExecStart=/srv/corefed/{place}/start.sh{arguments}
Restart=on-failure
RestartSec=10
# corefed tells systemd every few seconds that it watches its programs; frozen, it is restarted.
NotifyAccess=main
WatchdogSec=180
KillSignal=SIGTERM
TimeoutStopSec=20
# Every connection takes a file.
LimitNOFILE=65536
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths=/srv/corefed/{place}
# MemoryMax=8G

[Install]
WantedBy=multi-user.target
"""

SERVER_UNIT = _UNIT.format(
    file="corefed-server.service",
    service="corefed-server",
    what="Server of a corefed federation",
    place="server",
    arguments="",
)


def client_service(name: str) -> str:
    return _UNIT.format(
        file="corefed-client.service",
        service="corefed-client",
        what=f"Client {name} of a corefed federation",
        place=name,
        arguments=" /srv/corefed/data",
    )


def readme_text(directory: Path, clients: Sequence[str], address: Address) -> str:
    """README.md of the whole folder."""
    first = clients[0]
    alone = ""
    if address.host in ("localhost", "127.0.0.1", "::1"):
        alone = (
            f"\nThe address {address} is this machine alone: good for a trial. For clients on "
            "other machines make the federation with `--address HOST:PORT`.\n"
        )
    rows = "\n".join(f"| `clients/{name}/` | the machine of {name} | `key` |" for name in clients)
    return f"""\
# Federation {directory.name}

Clients: {", ".join(clients)}. Server: {address}.
{alone}
## What goes where

| folder | lives on | secret in it |
|---|---|---|
| `server/` | the server's machine | `server.key`, `ca.key` |
{rows}

Copy each client's folder to its machine over a channel that you trust, such as `scp -rp` (which
keeps the files' modes), and delete it here; nobody but that client needs its `key`. `ca.key` is
used by `corefed federation renew` only; keep it somewhere safe and offline. The other files are no
secrets, but `client.toml` and `federation.toml` are for their owners to decide about. Do not mail
keys, and do not put these folders under version control.

All machines need the same version of corefed: in a checkout, `pip install -e '.[flower]'`.

## On the server's machine

    corefed federation server server        # keeps running; or server/start.sh, or the service
    corefed federation run server           # in another terminal: trains, shows the progress
    corefed federation status server        # who is connected, which runs there are
    corefed federation stop server          # ends the training that is going on
    corefed federation resume server        # goes on with it at its last finished round

`server/experiment.toml` says what is trained, `server/federation.toml` how: deadlines, quorum,
bounds, robust aggregation, differential privacy. Runs are in `server/runs/`.

Open port {address.port} for the clients; it answers nothing else. Flower's control API has no
authentication, and is on a port of the server's own machine that no other machine reaches. So let
nobody log in there who should not start runs.

## On a client's machine

    corefed federation client {first} --data PATH     # or {first}/start.sh PATH, or the service

PATH is a folder, an image folder, an .npz file or a table; data do not leave the machine. What
this client decides for itself is in its `client.toml`: device, privacy, which metrics it shares,
how much work it does. The client keeps its private state in `state/` of its folder: keep that
folder. Its models are in `models/`; `models/current` is the one in use.

    corefed federation audit {first}     # what left this client

## Another client later

    corefed federation add server NAME

makes `clients/NAME/` and enters its public key; a server that is running takes it within seconds.
The new client takes part in the runs that are started afterwards.

A client that wants to make its key itself types

    ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f key

in its folder, and sends `key.pub` alone; put it into `server/clients/NAME.pub`.

    corefed federation remove server NAME

excludes a client: it gets no tasks, and Flower never admits its key again. Its place in `clients`
of `federation.toml` must stay, for the number of every client is its position.
"""
