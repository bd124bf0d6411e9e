"""OpenAI's Responses API: answers that are stored, and gone on from by their ids."""
