"""What is looked at before a server starts: settings in the environment, model, memory, machine."""
