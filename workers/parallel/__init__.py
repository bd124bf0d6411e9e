"""One worker on several processes: a model whose heads are divided between them (tensor parallelism)."""
