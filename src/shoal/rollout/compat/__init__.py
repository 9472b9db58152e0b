"""The environment managers of the references, thin over the rest of the room."""
