-- From version 11 to 12: sessions that are deleted after a time without a turn, worker states
-- at the ends of turns, and checksums of the values that SQLite cannot tell from damaged ones.

ALTER TABLE sessions ADD COLUMN expires_at REAL;
CREATE INDEX sessions_by_expiry ON sessions (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX sessions_of_tenants_by_expiry ON sessions (tenant, expires_at)
WHERE expires_at IS NOT NULL;

CREATE TABLE turn_states (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (session, turn)
) STRICT;

UPDATE worker_states SET state = seal(state);
UPDATE turns SET
    token_ids = seal(token_ids),
    utterance_tokens = seal(utterance_tokens, messages, outcome);
UPDATE prefixes SET token_ids = seal(token_ids);
UPDATE built_episodes SET built = seal(built);
UPDATE repairs SET positions = seal(positions);
