"""Suite mq-niah: needles that the second turn asks for."""
