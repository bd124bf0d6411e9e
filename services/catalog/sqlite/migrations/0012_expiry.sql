-- From version 11 to 12: sessions that are deleted after a time without a turn.

ALTER TABLE sessions ADD COLUMN expires_at REAL;
CREATE INDEX sessions_by_expiry ON sessions (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX sessions_of_tenants_by_expiry ON sessions (tenant, expires_at)
WHERE expires_at IS NOT NULL;
