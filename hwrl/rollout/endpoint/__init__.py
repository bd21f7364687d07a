"""OpenAI-compatible endpoints for agents, with a record of the policy's exact tokens."""
