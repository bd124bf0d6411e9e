"""Suite sampling: what a model's answers are like under defaults of temperature, top_p and the like."""
