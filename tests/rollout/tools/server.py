"""An MCP server of the tests, over its pipes or at a port, with tools that misbehave."""

import asyncio
import json
import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1
    MCPServer = None
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

PORT = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 8000
if MCPServer is None:
    from mcp.server.fastmcp import FastMCP

    app = FastMCP("test", port=PORT)
else:
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


said = []


@app.tool()
def remember(word: str) -> str:
    """Remember a word; all of those that this process has."""
    said.append(word)
    return " ".join(said)


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
            EmbeddedResource(
                type="resource", resource=TextResourceContents(uri="file:///a.txt", text="inside")
            )
        ],
        "bytes within": [
            EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///a.bin", blob="AAAA"))
        ],
        "a link": [ResourceLink(type="resource_link", uri="file:///b.txt", name="notes")],
        "a picture": [
            ImageContent(type="image", data="AAAA", mimeType="image/png"),
            TextContent(type="text", text="see"),
        ],
    }
    if kind in content:
        return CallToolResult(content=content[kind])
    texts = [TextContent(type="text", text=text[kind])] if kind in text else []
    return CallToolResult(content=texts, structuredContent=data, isError=kind == "error")


@app.tool()
def names() -> list[str]:
    """Names, of which the package of MCP makes a text each."""
    return ["a", "b"]


if __name__ == "__main__":
    if "mute" in sys.argv:
        time.sleep(60)
    if len(sys.argv) > 1:
        app.run("streamable-http", **({"port": PORT} if MCPServer else {}))
    else:
        app.run("stdio")
