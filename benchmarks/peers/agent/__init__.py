"""An agent's session with tool pauses, run through peers: the conversation, the run, the rows."""
