"""OpenAI and Anthropic endpoints in front of a sampler: any agent program becomes a rollout."""
