"""Runs a service of a node with this program's input and output, as ssh runs a command:

python -m launcher.nodes.connect NAME agent TOKEN
"""

import asyncio
import sys

import asyncssh

from launcher.nodes.client import node_named
from launcher.nodes.door import PACKET_BYTES, WINDOW_BYTES
from launcher.nodes.group import NodeFiles, node_folder
from launcher.nodes.link import connect
from launcher.nodes.messages import NodeError
from launcher.supervisor import write_line
from serve.core.errors import BrigadeError


async def run(name: str, service: str) -> int:
    """Returns 0 if the service has ended, and 1 if the connection was lost. Raises BrigadeError,
    NodeError."""
    node = await asyncio.to_thread(node_named, name)
    connection = await connect(node.place, NodeFiles(node_folder()))
    async with connection:
        process = await connection.create_process(
            service,
            encoding=None,
            window=WINDOW_BYTES,
            max_pktsize=PACKET_BYTES,
            stdin=sys.stdin.buffer,
            stdout=sys.stdout.buffer,
            stderr=sys.stderr.buffer,
        )
        await process.wait()
    return process.returncode if process.returncode is not None else 1


def main() -> int:
    name, *service = sys.argv[1:]
    try:
        return asyncio.run(run(name, " ".join(service)))
    except (BrigadeError, NodeError) as error:
        write_line(f"{error}")
    except (asyncssh.Error, OSError) as error:
        write_line(f"{name}: the connection was lost ({error})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
