"""Suite mq-niah: needles that the second turn asks for, after a compression for the first."""
