"""`client_app` and `server_app`: the two halves of a federation as Flower runs them.

Flower starts a process per message, so nothing heavy is imported before a message asks for it.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, cast

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from corefed.federation.flower import records

if TYPE_CHECKING:
    from corefed.federation.task_context import ClientSettings

client_app = ClientApp()
server_app = ServerApp()


@client_app.query()
@client_app.train()
@client_app.evaluate()
def _answer(message: Message, context: Context) -> Message:
    from corefed.federation.operate import folder  # a fraction of a second

    try:
        settings = folder.ClientFolder.from_environment().settings()
    except Exception:  # Flower would send its text, which names paths, to the server
        traceback.print_exc()
        raise RuntimeError("it cannot read its own folder; its own log says why") from None
    return answer_message(message, settings)


def answer_message(message: Message, settings: ClientSettings) -> Message:
    """A client's reply to a message of the server."""
    from corefed.federation import client  # torch takes a second

    reply = client.answer(records.task_from(message.content), settings)
    return Message(records.reply_to_records(reply), reply_to=message)


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    from corefed.base.locks import exclusively
    from corefed.federation import server  # torch takes a second
    from corefed.federation.flower.asked import NotedGrid
    from corefed.federation.flower.link import FlowerLink, bounded_pulls
    from corefed.federation.operate import folder

    here = folder.ServerFolder.from_environment()
    path = here.run_folder(str(context.run_config.get("run", "")))
    keys = here.keys()
    noted = cast("Grid", NotedGrid(grid, keys, path))
    link = FlowerLink(noted, keys, here.rules.max_message_mb, here.bound_messages, here.turned_away)
    with exclusively(path), bounded_pulls(link):
        server.federate(path, here.clients, here.rules, link)
