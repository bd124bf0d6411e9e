"""The model, its attention and tokenizer, and the sentence encoder."""
