"""Training language-model agents on groups of episodes."""
