"""OpenAI's Conversations API: items that clients keep under an id."""
