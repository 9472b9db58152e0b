"""Jobs that need each other, and what they made, kept as versions; nothing here knows of learning."""
