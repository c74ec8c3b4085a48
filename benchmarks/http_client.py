"""A cheap client: the same request again and again over connections that stay open.

    python -m benchmarks.http_client PORT PATH CONNECTIONS REQUESTS < BODY

Prints a line of JSON: seconds, bytes received, and how many answers had which status.  It looks for
nothing but where an answer ends, so that the server is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter


class Load:
    """So many requests over so many connections; every connection takes the next one."""

    def __init__(self, request: bytes, count: int) -> None:
        self.request = request
        self.left = count
        self.statuses: Counter[str] = Counter()
        self.num_bytes = 0

    async def run(self, port: int, connections: int) -> None:
        await asyncio.gather(*(self._connection(port) for _ in range(connections)))

    async def _connection(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while self.left > 0:
            self.left -= 1
            writer.write(self.request)
            head = await reader.readuntil(b"\r\n\r\n")
            self.statuses[head[9:12].decode()] += 1
            _, found, rest = head.lower().partition(b"content-length: ")
            if found:
                self.num_bytes += len(await reader.readexactly(int(rest.split(b"\r")[0])))
            else:
                await self._chunks(reader)
        writer.close()

    async def _chunks(self, reader: asyncio.StreamReader) -> None:
        """Read until the last chunk, which is empty; the pieces are not taken apart."""
        tail = b""
        while tail != b"\r\n0\r\n\r\n":
            part = await reader.read(1 << 18)
            if not part:
                raise ConnectionError("the answer was cut")
            self.num_bytes += len(part)
            tail = (tail + part)[-7:]


def main() -> None:
    """Run, and print what came of it."""
    port, path, connections, count = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    body = sys.stdin.buffer.read()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    load = Load(head.encode() + body, count)
    began = time.perf_counter()
    asyncio.run(load.run(port, connections))
    seconds = time.perf_counter() - began
    print(json.dumps({"s": seconds, "bytes": load.num_bytes, "statuses": load.statuses}))


if __name__ == "__main__":
    main()
