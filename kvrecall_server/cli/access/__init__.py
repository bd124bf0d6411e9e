"""Commands about who may read what: API keys, and keys of encryption at rest."""
