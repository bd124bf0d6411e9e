-- From schema 6, written by kvrecall 0.2.0: sums are stored, pieces of tool output have rows of their
-- own, idempotency records are bounded by age. SQL function that the runner provides
-- (services/catalog/summaries.py): summarize_pieces(json, delta_due).

DROP INDEX sessions_by_tenant;
CREATE INDEX sessions_by_creation ON sessions (created_at, id);

CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    sessions INTEGER NOT NULL,
    tokens INTEGER NOT NULL
) STRICT;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    INSERT INTO tenants (tenant, sessions, tokens) VALUES (NEW.tenant, 1, NEW.length)
    ON CONFLICT (tenant) DO UPDATE SET sessions = sessions + 1, tokens = tokens + NEW.length;
END;
CREATE TRIGGER session_changed AFTER UPDATE OF length ON sessions BEGIN
    UPDATE tenants SET tokens = tokens + NEW.length - OLD.length WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER session_deleted AFTER DELETE ON sessions BEGIN
    UPDATE tenants SET sessions = sessions - 1, tokens = tokens - OLD.length
    WHERE tenant = OLD.tenant;
    DELETE FROM tenants WHERE tenant = OLD.tenant AND sessions = 0;
END;

INSERT INTO tenants (tenant, sessions, tokens)
SELECT tenant, count(*), sum(length) FROM sessions GROUP BY tenant;

CREATE TABLE tool_output (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    position INTEGER NOT NULL,
    piece INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (session, turn, position, piece)
) STRICT, WITHOUT ROWID;

INSERT INTO tool_output (session, turn, position, piece, text)
SELECT session, turn, position, CAST(pieces.key AS INTEGER), pieces.value
FROM tool_calls, json_each(tool_calls.pieces) AS pieces;
ALTER TABLE tool_calls RENAME COLUMN pieces TO output;
UPDATE tool_calls SET output = summarize_pieces(output, delta_due);

ALTER TABLE idempotency_records RENAME TO old_records;
CREATE TABLE idempotency_records (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    created TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    response TEXT NOT NULL,
    stored_at REAL NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT;
INSERT INTO idempotency_records (scope, key, created, fingerprint, response, stored_at)
SELECT scope, key, created, fingerprint, response, CAST(strftime('%s', 'now') AS REAL)
FROM old_records;
DROP TABLE old_records;
CREATE INDEX idempotency_records_by_age ON idempotency_records (stored_at);
