-- From version 12 to 13: API keys.

CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    pepper TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL,
    last_used_at REAL
) STRICT, WITHOUT ROWID;
