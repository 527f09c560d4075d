"""Questions to Flower's control API, asked by a subprocess that prints the answer as JSON.

    nodes   the keys that Flower knows, with their states; new ones among those that come as JSON
            on stdin, name -> key, are registered
    runs    the runs that were submitted, with their states

Commands of `flwr` do the same, but each imports all of Flower's command line. `flwr supernode list`
leaves out keys and names, and `flwr supernode register` takes one key at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corefed.base.errors import UserError
from corefed.federation.operate import processes
from corefed.federation.operate.folder import ServerFolder

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient


def ask(server: ServerFolder, question: str, given: Mapping[str, str] | None = None) -> Any:
    """The answer; a UserError with the last line of the output where there is none."""
    command = [sys.executable, "-m", "corefed.federation.operate.control", question]
    try:
        done = subprocess.run(
            command,
            env=processes.server_environment(server),
            input=json.dumps(given or {}),
            capture_output=True,
            text=True,
            timeout=processes.PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"Flower does not answer ({question}) within {processes.PATIENCE:.0f} s."
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"Flower does not answer ({question}): {last}")
    return json.loads(done.stdout.splitlines()[-1])  # Flower speaks before


def list_nodes(client: ControlHttpClient) -> list[dict[str, str]]:
    """As they were before any was registered."""
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest  # an extra

    known = [
        {"node": str(each.node_id), "status": each.status, "key": each.public_key.decode()}
        for each in client.ListNodes(ListNodesRequest()).nodes_info
    ]
    keys = {each["key"] for each in known}
    for name, key in json.load(sys.stdin).items():
        request = RegisterNodeRequest(public_key=key.encode(), name=name)
        if key not in keys and not client.RegisterNode(request).node_id:
            sys.exit(f"the key of {name} was not registered")
    return known


def list_runs(client: ControlHttpClient) -> list[dict[str, str]]:
    """A status is, as in `flwr ls`, "running" or "finished:completed", for instance."""
    from flwr.proto.control_pb2 import ListRunsRequest  # an extra

    return [
        {
            "id": str(each.run_id),
            "status": ":".join(filter(None, [each.status.status, each.status.sub_status])),
            "details": each.status.details,
        }
        for each in client.ListRuns(ListRunsRequest()).run_dict.values()
    ]


def main() -> None:
    from flwr.supercore.control import ControlHttpClient  # an extra

    server = ServerFolder.from_environment()
    client = ControlHttpClient.from_server_address(
        str(processes.link_address(server)),
        insecure=False,
        root_certificates=(server.path / "ca.crt").read_bytes(),
        interceptors=[],
    )
    with client:
        question = {"nodes": list_nodes, "runs": list_runs}[sys.argv[1]]
        print(json.dumps(question(client)))


if __name__ == "__main__":
    main()
