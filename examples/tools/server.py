"""The MCP server of the vault: it knows which door a code opens."""

from mcp.server.mcpserver import MCPServer
from vault import DOORS, secret

app = MCPServer("doors")


@app.tool()
def door(code: int) -> str:
    """The door that a code opens."""
    return DOORS[secret(f"code {code}", len(DOORS))]


if __name__ == "__main__":
    app.run("stdio")
