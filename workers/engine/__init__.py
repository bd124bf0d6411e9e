"""One session at a time: model, cache, store and tokenizer connected."""
