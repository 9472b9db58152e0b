"""An MCP server of the tests, over its pipes or at a port, with tools that misbehave."""

import asyncio
import json
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

app = MCPServer("test")


@app.tool()
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@app.tool()
def refuse() -> str:
    """Say that it is an error."""
    raise ValueError("not today")


@app.tool()
def once(file: str) -> str:
    """End the process in the first call for a file."""
    if not os.path.exists(file):
        open(file, "w").close()
        os._exit(3)
    return "alive"


@app.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@app.tool()
async def slow() -> str:
    """Answer late, and let others go on."""
    await asyncio.sleep(30)
    return "late"


@app.tool()
async def freeze() -> str:
    """Answer late, and let nobody go on."""
    time.sleep(60)
    return "late"


@app.tool()
def nonsense() -> str:
    """Print what is no message, then answer."""
    os.write(1, b"what?\n{}\n[1]\n")
    return "sense"


@app.tool()
def shows(kind: str) -> CallToolResult:
    """A result of a kind."""
    data = {"rows": [{"city": "Køge", "degrees": 2.5}], "more": None}
    text = {
        "its own": "two rows",
        "the same": json.dumps(data, indent=1),
        "within": f"Here: {json.dumps(data)}",
    }
    content = {
        "a text within": [
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="inside"))
        ],
        "bytes within": [EmbeddedResource(resource=BlobResourceContents(uri="file:///a.bin", blob="AAAA"))],
        "a link": [ResourceLink(uri="file:///b.txt", name="notes")],
        "a picture": [ImageContent(data="AAAA", mime_type="image/png"), TextContent(text="see")],
    }
    if kind in content:
        return CallToolResult(content=content[kind])
    texts = [TextContent(text=text[kind])] if kind in text else []
    return CallToolResult(content=texts, structured_content=data, is_error=kind == "error")


@app.tool()
def names() -> list[str]:
    """Names, of which the package of MCP makes a text each."""
    return ["a", "b"]


if __name__ == "__main__":
    if "mute" in sys.argv:
        time.sleep(60)
    if len(sys.argv) > 1:
        app.run("streamable-http", port=int(sys.argv[1]))
    else:
        app.run("stdio")
