"""What clients of OpenAI's Responses and Conversations APIs read again, in each kind of catalog."""
