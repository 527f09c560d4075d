"""The nodes that Flower knows, by their keys, printed as JSON by a process of its own.

`flwr supernode list` leaves keys and names out, so this asks the same API for the same list.
"""

from __future__ import annotations

import json


def main() -> None:
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    client = init_http_client_from_connection(read_superlink_connection(None))
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    finally:
        client.close()
    rows = [
        {"node": str(each.node_id), "status": each.status, "key": each.public_key.decode()}
        for each in nodes
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
