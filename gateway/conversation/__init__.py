"""What the APIs of conversations share: messages in, directives, answers out."""
