-- From version 13 to 14: responses and conversations of OpenAI's API.

CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    opening TEXT NOT NULL,
    history TEXT NOT NULL,
    hidden INTEGER NOT NULL,
    body TEXT NOT NULL,
    expires_at REAL NOT NULL
) STRICT;
CREATE INDEX responses_by_session ON responses (session);
CREATE INDEX responses_by_age ON responses (expires_at);

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata TEXT NOT NULL
) STRICT;
CREATE INDEX conversations_by_tenant ON conversations (tenant);

CREATE TABLE conversation_items (
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (conversation, position),
    UNIQUE (conversation, id)
) STRICT;
