"""What a chat template rewrites of a session's log once new messages follow."""
