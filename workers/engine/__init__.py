"""The engine: model, cache, store and tokenizer, connected for one session at a time."""
