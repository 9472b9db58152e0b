"""Tools that a model calls in the middle of an episode: Python functions and MCP servers."""
