"""OpenAI's API over sessions: chat completions and models, for clients that keep no session."""
