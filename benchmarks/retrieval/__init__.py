"""Cost of retrieval while decoding: whole answers of a model, and one layer's step at large sizes."""
