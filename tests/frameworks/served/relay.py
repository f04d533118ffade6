"""usage: relay.py PORT URL      Pass each connection to PORT on to the server at URL, as if the server were here."""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit

HOST = "127.0.0.1"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main(port: int, url: str) -> None:
    to = urlsplit(url)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(to.hostname, to.port)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer), return_exceptions=True)

    async with await asyncio.start_server(connected, HOST, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
