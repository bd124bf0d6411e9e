"""Cost of stored rows: whole answers of a model, whole prompts, and one layer's step at large sizes."""
